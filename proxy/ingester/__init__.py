"""Keep what workers recorded: move it to PostgreSQL, migrate the schema, and report metrics."""
