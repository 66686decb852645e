"""Revision 0021: API keys, beside the rows that there were before."""

from sqlalchemy import text

from store.connection.engine import make_engine
from store.keys.keys import create_key, key_ring, revoke_key
from store.schema.migrate import check, downgrade, upgrade
from store.write.ingest import Ingester
from tests.support.records import call, reward

ROWS = "SELECT e.key, e.task, e.reward, t.reply FROM episodes e JOIN transitions t ON t.id = e.id"


async def rows(url: str) -> list[tuple[object, ...]]:
    engine = make_engine(url)
    async with engine.connect() as connection:
        found = sorted(map(tuple, await connection.execute(text(ROWS))), key=str)
    await engine.dispose()
    return found


async def test_what_was_stored_before_stays_and_no_key_was_made(database_url: str) -> None:
    url = database_url
    engine = make_engine(url)
    await Ingester().store(engine, [call("e1", task="t"), call("e2"), reward(0.5, episode="e1")])
    await engine.dispose()
    await downgrade(url, "0020")
    before = await rows(url)
    assert len(before) == 2

    await upgrade(url)
    await check(url)
    assert await rows(url) == before
    engine = make_engine(url)
    async with engine.begin() as connection:
        assert not (await key_ring(connection)).made
        await create_key(connection, "agent", ("infer",))
        assert (await key_ring(connection)).made
        await revoke_key(connection, "agent")
    await engine.dispose()

    await downgrade(url, "0020")
    assert await rows(url) == before
    await upgrade(url)
    await check(url)
    engine = make_engine(url)
    async with engine.connect() as connection:
        assert not (await key_ring(connection)).made
    await engine.dispose()
