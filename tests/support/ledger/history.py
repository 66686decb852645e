"""Rewrite the history of versions: as before it was kept, or with other evidence."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection


async def let_events_change(connection: AsyncConnection) -> None:
    """Let this transaction change and delete events of versions, which triggers refuse."""
    await connection.execute(text("SET LOCAL session_replication_role = replica"))
