"""What a worker asks the database: within a short limit, and on connections that are kept."""

from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.lookup import Lookup
from store.driver import Driver
from tests.integration.conftest import settings_for
from tests.support.waiting import eventually


async def session(driver: Driver) -> int:
    number: int = await driver.fetchval("SELECT pg_backend_pid()")
    return number


async def test_database_connection_is_reused_until_it_is_lost_or_a_query_takes_too_long(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    lookup = Lookup(settings_for(database_url, "http://127.0.0.1:9/v1", tmp_path))

    async def another() -> bool:
        return await lookup.ask(session, within_s=60) not in (None, first)

    first = await lookup.ask(session, within_s=60)
    assert first is not None
    assert await lookup.ask(session, within_s=60) == first
    async with engine.connect() as connection:
        await connection.execute(text("SELECT pg_terminate_backend(:id)"), {"id": first})
    await eventually(another)
    first = await lookup.ask(session, within_s=60)
    assert await lookup.ask(lambda d: d.execute("SELECT pg_sleep(60)"), within_s=0.1) is None
    await eventually(another)
    lookup.close()
