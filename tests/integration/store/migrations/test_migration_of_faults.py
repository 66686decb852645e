"""Revision 0016: the times of faults. None is known of what there was before."""

from sqlalchemy import text

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.updates.faults import note_fault
from store.updates.policies import ensure_base
from store.updates.ready import ClaimRule
from store.updates.signal import waiting_updates
from store.write.ingest import Ingester
from tests.support.records import call, reward

RULE = ClaimRule(policy="m", group_size=1, groups=1, smallest_group=1, max_age_s=1.0)
TABLE = "SELECT to_regclass('fault_times') IS NOT NULL"


async def test_episodes_from_before_may_be_claimed_and_those_set_aside_again_on_the_way_back(
    database_url: str,
) -> None:
    url = database_url
    engine = make_engine(url)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    await Ingester().store(engine, [call("e"), reward(1.0, episode="e")])
    for _ in range(2):
        await engine.dispose()
        await downgrade(url, "0015")
        async with engine.connect() as connection:
            assert not await connection.scalar(text(TABLE))
        await engine.dispose()
        await upgrade(url)
        await check(url)
        async with engine.begin() as connection:
            assert await waiting_updates(connection, RULE) == 1
            assert await note_fault(connection, "m") == 1
            assert await waiting_updates(connection, RULE) == 0
    await engine.dispose()
