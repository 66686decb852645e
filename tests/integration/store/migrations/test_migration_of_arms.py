"""Revision 0026: calls get an arm, and none of those that there are is read for it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.write.ingest import ingest
from tests.support.records import ago, call

DAY_S = 86_400.0
# How often partitions were read from end to end.
READ = text(
    "SELECT COALESCE(sum(seq_scan), 0) FROM pg_stat_user_tables WHERE relname LIKE 'transitions_%'"
)
CALLED = text(
    "UPDATE transitions SET arm = :arm WHERE episode_id = (SELECT id FROM episodes"
    " WHERE key = :key)"
)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[AsyncConnection]:
    """A connection whose process ends with it, by which its figures are there for all."""
    engine = make_engine(url)
    try:
        async with engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()


async def test_no_call_is_read_while_all_others_are_kept_from_them(
    empty_database_url: str,
) -> None:
    url = empty_database_url
    await upgrade(url)
    async with connected(url) as connection:
        await ingest(connection, [call("new"), call("old", **ago(DAY_S))])
    await downgrade(url, "0025")
    async with connected(url) as connection:
        before = await connection.scalar(READ)
    await upgrade(url)
    async with connected(url) as connection:
        assert await connection.scalar(READ) == before
    await check(url)


async def test_what_was_there_and_what_comes_has_an_arm_that_there_is(
    empty_database_url: str,
) -> None:
    url = empty_database_url
    await upgrade(url)
    async with connected(url) as connection:
        await ingest(connection, [call("old", **ago(DAY_S))])
    await downgrade(url, "0025")
    await upgrade(url)
    async with connected(url) as connection:
        # Of a day that was there, and of one that comes.
        await ingest(connection, [call("of-that-day", arm="canary", **ago(DAY_S, 1)), call("new")])
    for key in ("old", "of-that-day", "new"):
        async with connected(url) as connection:
            await connection.execute(CALLED, {"arm": "base", "key": key})
        with pytest.raises(IntegrityError, match="ck_transitions_arm_known"):
            async with connected(url) as connection:
                await connection.execute(CALLED, {"arm": "other", "key": key})
