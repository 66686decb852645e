"""Alembic's scripts: the one way the schema changes."""
