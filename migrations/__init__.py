"""Alembic's migration scripts. The schema changes through them only (`store.schema.migrate`)."""
