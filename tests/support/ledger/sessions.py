"""Wait for the database to be done with what a killed process had sent to it."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.support.waiting import eventually

_BUSY = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle'"
)


async def until_idle(engine: AsyncEngine) -> None:
    """Wait until no other session of the database is at work: a commit may outlive its sender."""

    async def idle() -> bool:
        async with engine.connect() as connection:
            return await connection.scalar(_BUSY) == 0

    await eventually(idle)
