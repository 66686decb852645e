"""Revisions 0018 and 0019: indexes of what is ready, on rows that there were before."""

import pytest
from sqlalchemy import text

from store.connection.engine import make_engine
from store.schema.migrate import check, downgrade, upgrade
from store.updates.choice import find_ready
from store.updates.policies import ensure_base
from store.updates.ready import ClaimRule
from store.write.ingest import Ingester
from tests.support.records import call, reward

SINGLES = ClaimRule(policy="m", group_size=1, groups=2, smallest_group=1, max_age_s=1e9)
INDEXES = "SELECT indexdef FROM pg_indexes WHERE tablename = 'episode_policies'"


@pytest.mark.parametrize(
    ("before", "added"), [("0017", "INCLUDE (reward, episode_id)"), ("0018", "date_bin")]
)
async def test_what_waited_before_is_ready_after(
    database_url: str, before: str, added: str
) -> None:
    url = database_url
    engine = make_engine(url)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    records = [one for key in "ab" for one in (call(key), reward(1.0, episode=key))]
    await Ingester().store(engine, records)
    await engine.dispose()
    await downgrade(url, before)

    for _ in range(2):
        await upgrade(url)
        await check(url)
        assert added in await indexes(url)
        assert await ready(url) == 2
        await downgrade(url, before)
        assert added not in await indexes(url)


async def ready(url: str) -> int:
    """How many episodes are found with the indexes."""
    engine = make_engine(url)
    async with engine.connect() as connection:
        found = await find_ready(connection, SINGLES, 0)
    await engine.dispose()
    return len(found)


async def indexes(url: str) -> str:
    """How the indexes are made; both episodes are there whatever they are."""
    engine = make_engine(url)
    async with engine.connect() as connection:
        waiting = text("SELECT count(*) FROM episode_policies WHERE claimable")
        assert await connection.scalar(waiting) == 2
        made = "\n".join((await connection.execute(text(INDEXES))).scalars())
    await engine.dispose()
    return made
