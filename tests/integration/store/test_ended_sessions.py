"""A session that PostgreSQL ends, as it does when it is stopped, is no record's fault."""

import asyncio
from typing import Any

import asyncpg
import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import is_answering, is_unavailable, make_engine

END = "SELECT pg_terminate_backend({})"
# Turns of the event loop between the end and the next query: until then asyncpg has read nothing,
# or the server's last words, or the end of the connection.
TURNS = range(7)


def url_of(engine: AsyncEngine) -> str:
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.mark.parametrize("turns", TURNS)
async def test_database_session_ended_before_a_query_counts_as_an_unavailable_database(
    engine: AsyncEngine, turns: int
) -> None:
    async with engine.connect() as ended:
        pid = (await ended.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        async with engine.connect() as other:
            await other.execute(text(END.format(pid)))
        for _ in range(turns):
            await asyncio.sleep(0)
        with pytest.raises(DBAPIError) as raised:
            await ended.execute(text("SELECT 1"))
        await ended.invalidate()
    assert is_unavailable(raised.value)
    assert await is_answering(engine)


@pytest.mark.parametrize("turns", TURNS)
async def test_database_session_ended_while_connecting_counts_as_no_answer(
    engine: AsyncEngine, turns: int
) -> None:
    """The server ends it before SQLAlchemy has asked its first questions."""
    ender: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(url_of(engine))
    fresh = make_engine(url_of(engine))

    async def end(made: "asyncpg.Connection[asyncpg.Record]") -> None:
        await ender.execute(END.format(made.get_server_pid()))
        for _ in range(turns):
            await asyncio.sleep(0)

    def ended(connection: Any, _record: Any) -> None:
        connection.run_async(end)

    event.listen(fresh.sync_engine, "connect", ended, insert=True)
    try:
        assert not await is_answering(fresh)
        event.remove(fresh.sync_engine, "connect", ended)
        assert await is_answering(fresh)
    finally:
        await fresh.dispose()
        await ender.close()
