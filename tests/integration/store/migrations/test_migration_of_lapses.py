"""Revision 0020: lapses. Rows from before stay as they are, and can be set aside from then on."""

from datetime import UTC, datetime

from sqlalchemy import text

from store.connection.engine import make_engine
from store.ids import new_id
from store.link.lapses import LAPSED
from store.records import LapseRecord
from store.schema.migrate import check, downgrade, upgrade
from store.write.ingest import Ingester
from tests.support.records import ago, call

TABLE = "SELECT to_regclass('lapses') IS NOT NULL"
REASONS = "SELECT key, quarantined_reason FROM episodes ORDER BY key"


async def test_episodes_from_before_are_set_aside_and_stay_so_on_the_way_back(
    empty_database_url: str,
) -> None:
    url = empty_database_url
    await upgrade(url, "0019")
    engine = make_engine(url)
    async with engine.connect() as connection:
        assert not await connection.scalar(text(TABLE))
    await engine.dispose()
    await upgrade(url)
    await Ingester().store(engine, [call("near"), call("far", **ago(3 * 3600.0))])
    await engine.dispose()

    for reason in (None, LAPSED):
        await downgrade(url, "0019")
        async with engine.connect() as connection:
            rows = await connection.execute(text(REASONS))
            assert [tuple(row) for row in rows] == [("far", None), ("near", reason)]
            assert not await connection.scalar(text(TABLE))
        await engine.dispose()
        await upgrade(url)
        await check(url)
        now = datetime.now(UTC)
        await Ingester().store(engine, [LapseRecord(id=new_id(), since=now, until=now)])
        await engine.dispose()
    async with engine.connect() as connection:
        rows = await connection.execute(text(REASONS))
        assert [tuple(row) for row in rows] == [("far", None), ("near", LAPSED)]
    await engine.dispose()
