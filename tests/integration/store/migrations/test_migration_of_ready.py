"""Revision 0018: the index of what is ready has the episode, on rows that there were before."""

from sqlalchemy import text

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.updates.policies import ensure_base
from store.updates.ready import ClaimRule, find_ready
from store.write.ingest import Ingester
from tests.support.records import call, reward

SINGLES = ClaimRule(policy="m", group_size=1, groups=2, smallest_group=1, max_age_s=1e9)
INDEX = "SELECT indexdef FROM pg_indexes WHERE indexname = 'ix_episode_policies_ready'"


async def test_what_waited_before_is_ready_after(empty_database_url: str) -> None:
    url = empty_database_url
    await upgrade(url, "0017")
    engine = make_engine(url)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    records = [one for key in "ab" for one in (call(key), reward(1.0, episode=key))]
    await Ingester().store(engine, records)
    await engine.dispose()

    for _ in range(2):
        await upgrade(url)
        await check(url)
        assert "episode_id" in await ready_index(url)
        await downgrade(url, "0017")
        assert "episode_id" not in await ready_index(url)


async def ready_index(url: str) -> str:
    """How the index is made; both episodes are found with it."""
    engine = make_engine(url)
    async with engine.connect() as connection:
        assert len(await find_ready(connection, SINGLES, 0)) == 2
        made: str = (await connection.execute(text(INDEX))).scalar_one()
    await engine.dispose()
    return made
