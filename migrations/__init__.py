"""Change the schema: these scripts of Alembic's are the only way (`store.schema.migrate`)."""
