"""Define the database's schema: tables, day partitions, and migrations."""
