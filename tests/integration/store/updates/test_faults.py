"""What a server sampled while it was at fault is set aside: neither claimed nor spent."""

from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.claim_query import ClaimRule, exclude_after_fault, waiting_updates
from store.claims import expire_episodes
from store.records import CallRecord
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.ledger.episodes import keys
from tests.support.ledger.lineage import add_in_state
from tests.support.ledger.updates import claimed
from tests.support.records import ago, call, reward

RULE = ClaimRule(policy="m", group_size=1, groups=99, max_age_s=1e-6, fewest=1)
SMALL = msgspec.structs.replace(RULE, groups=1, max_staleness=0)


def made(key: str, *times: float, **changes: Any) -> list[CallRecord]:
    """An episode with calls so many seconds ago."""
    return [call(key, task="t", **ago(at, number), **changes) for number, at in enumerate(times)]


async def fill(engine: AsyncEngine, *, learned: bool) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        if learned:
            await connection.execute(text("UPDATE policies SET state = 'retired'"))
            await add_in_state(connection, "m", 1, "serving")
            # Its update was claimed after the first episodes, and before the others.
            await connection.execute(
                text("UPDATE updates SET claimed_at = now() - interval '200 s'")
            )
    calls = [
        *made("before", 300.0),
        *made("across", 301.0, 100.0),
        *made("under", 101.0),
        # It ends after the fault, which it began under.
        *made("into", 102.0, -5.0),
        *made("after", -6.0),
    ]
    names = dict.fromkeys(one.episode for one in calls)
    await Ingester().store(engine, [*calls, *(reward(1.0, episode=key) for key in names)])


async def taken(engine: AsyncEngine, **changes: Any) -> list[str]:
    return sorted(keys(await claimed(engine, msgspec.structs.replace(RULE, **changes), 1)))


@pytest.mark.parametrize(("learned", "kept"), [(True, ["after", "before"]), (False, ["after"])])
@pytest.mark.parametrize("group_size", [1, 2])
async def test_episodes_sampled_during_a_fault_of_the_model_server_are_not_claimed(
    engine: AsyncEngine, learned: bool, kept: list[str], group_size: int
) -> None:
    await fill(engine, learned=learned)
    async with engine.begin() as connection:
        assert await waiting_updates(connection, SMALL) == 5
        assert await exclude_after_fault(connection, "m") == 5 - len(kept)
        # Known twice, it is one.
        assert await exclude_after_fault(connection, "m") == 5 - len(kept)
        assert await connection.scalar(text("SELECT count(*) FROM fault_times")) == 1
        assert await waiting_updates(connection, SMALL) == len(kept)
    assert await taken(engine, group_size=group_size) == kept


async def test_fault_of_a_model_server_sets_aside_no_episodes_of_another_policy(
    engine: AsyncEngine,
) -> None:
    await fill(engine, learned=True)
    async with engine.begin() as connection:
        assert await exclude_after_fault(connection, "other") == 0
    assert len(await taken(engine)) == 5


async def test_episodes_set_aside_by_a_fault_of_the_model_server_expire_as_stale(
    engine: AsyncEngine,
) -> None:
    await fill(engine, learned=True)
    async with engine.begin() as connection:
        await exclude_after_fault(connection, "m")
        assert await expire_episodes(connection, SMALL, 1, {}) == {"stale": 5}
