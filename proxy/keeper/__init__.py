"""The keeper: moves records from the spool to PostgreSQL, migrates it, and reports metrics."""
