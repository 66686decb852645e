"""Alembic's scripts, the only way to change the schema (`store.schema.migrate`)."""
