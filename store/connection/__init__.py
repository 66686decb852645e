"""Connect to PostgreSQL, and tell what its errors mean."""
