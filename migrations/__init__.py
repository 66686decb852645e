"""Alembic's migration scripts. The schema changes through them only (`store.migrate`)."""
