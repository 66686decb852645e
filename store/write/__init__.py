"""Write recorded calls and feedback to the database."""
