"""Revision 0029: the key of each episode's first call, of rows that there were before."""

from typing import Any, Final

from sqlalchemy import text

from store.connection.engine import make_engine
from store.deleting.delete import delete_episode
from store.schema.migrate import check, downgrade, upgrade
from store.write.ingest import Ingester
from tests.support.records import call

KEYS: Final = """
    SELECT e.key, e.api_key, p.api_key
    FROM episodes e JOIN episode_policies p ON p.episode_id = e.id
    WHERE deleted_at IS NULL ORDER BY 1
"""
DELETED: Final = "SELECT api_key FROM episodes WHERE deleted_at IS NOT NULL"


async def asked(url: str, query: str) -> list[tuple[Any, ...]]:
    engine = make_engine(url)
    async with engine.connect() as connection:
        rows = [tuple(row) for row in await connection.execute(text(query))]
    await engine.dispose()
    return rows


async def test_episodes_from_before_have_the_key_of_their_first_call(database_url: str) -> None:
    url = database_url
    engine = make_engine(url)
    await Ingester().store(
        engine,
        [
            call("two", api_key="first"),
            call("two", api_key="second"),
            call("one", api_key="only"),
            call("none"),
            call("gone", api_key="forgotten"),
        ],
    )
    async with engine.begin() as connection:
        gone = await connection.scalar(text("SELECT id FROM episodes WHERE key = 'gone'"))
        await delete_episode(connection, gone)
    await engine.dispose()
    stored = await asked(url, KEYS)
    assert stored == [("none", None, None), ("one", "only", "only"), ("two", "first", "first")]
    for _ in range(2):
        assert await asked(url, DELETED) == [(None,)]
        await downgrade(url, "0028")
        await upgrade(url)
        await check(url)
        assert await asked(url, KEYS) == stored
