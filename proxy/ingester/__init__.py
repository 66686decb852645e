"""Move the workers' records to PostgreSQL, migrate its schema, and serve metrics."""
