"""Run migrations on the connection that `store.schema.migrate` passes to Alembic."""

from alembic import context
from sqlalchemy import Connection

from store.schema.tables import metadata


def include_name(name: str | None, kind: str, _parents: object) -> bool:
    """Exclude the day partitions of `transitions` from comparison; the drainer creates them."""
    return not (kind == "table" and name is not None and name.startswith("transitions_"))


connection: Connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, include_name=include_name)
with context.begin_transaction():
    context.run_migrations()
