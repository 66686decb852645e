"""Which recorded calls a candidate answers: held-out ones, and some not trained on lately."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.deleting import delete_episode
from store.read.replayed import Chosen, chosen_calls, replayed_calls
from store.tenants import DEFAULT, scoped
from store.version_queries import list_versions
from store.version_states import ensure_base
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import trained
from tests.support.records import ago, call, tokens

BEFORE_S = 3600.0


async def recorded(
    connection: AsyncConnection, *keys: str, split: str = "train", ago_s: float = BEFORE_S
) -> None:
    """One call of the policy in each episode, whose prompt is the episode's number."""
    calls = [
        call(key, split=split, tokens=tokens([int(key[-1])], [5, 6]), **ago(ago_s, number))
        for number, key in enumerate(keys)
    ]
    await ingest(connection, calls)


async def chosen(
    connection: AsyncConnection, most: int, version: int = 1, serving: int = 0
) -> list[Chosen]:
    """What a candidate is asked that was made ten minutes ago."""
    [candidate] = [one for one in await list_versions(connection, "m") if one.version == version]
    before = datetime.fromtimestamp(datetime.now(UTC).timestamp() - 600, UTC)
    return await chosen_calls(connection, candidate, serving, before, most)


async def numbers(connection: AsyncConnection, calls: Sequence[Chosen]) -> set[int]:
    found = await replayed_calls(connection, [one.call for one in calls])
    return {one.prompt_ids[0] for one in found.values()}


async def test_half_are_held_out_and_nothing_newer_was_trained_on_the_others(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, 1)
        await recorded(connection, "e1", "e2", split="eval")
        await recorded(connection, "t3", "t4", "t5", "t6", "t7", "t8")
        # Version 1 was trained on two of them, version 2 on a third.
        spent = text(
            "INSERT INTO consumptions (episode_id, policy, update_id, trained)"
            " SELECT e.id, 'm', u.id, true FROM episodes e, updates u"
            " WHERE (e.key, u.version) IN (('t3', 1), ('t4', 1), ('t5', 2))"
        )
        await connection.execute(spent)
        first = await chosen(connection, 6)
        assert [one.split for one in first] == ["eval"] * 2 + ["train"] * 4
        assert await numbers(connection, first) == {1, 2, 5, 6, 7, 8}
        # What came after it does not change what it is asked; another is asked something else.
        assert await chosen(connection, 6) == first
        assert await numbers(connection, await chosen(connection, 9, 2, 0)) == {1, 2, 6, 7, 8}
        # Once version 1 serves, what it was trained on may be asked.
        assert await numbers(connection, await chosen(connection, 9, 2, 1)) == {1, 2, 3, 4, 6, 7, 8}
        assert [one.split for one in await chosen(connection, 2)] == ["eval", "train"]


async def test_what_is_recorded_later_is_not_asked(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await recorded(connection, "t1", "t2")
        first = await chosen(connection, 4)
        await recorded(connection, "t3", "t4", ago_s=1.0)
        # Nor a later call of an episode that is asked about.
        await recorded(connection, "t1", ago_s=1.0)
        assert await chosen(connection, 4) == first
        assert await numbers(connection, first) == {1, 2}


async def test_what_is_deleted_or_quarantined_is_never_asked(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await recorded(connection, "t1", "t2", "t3")
        first = await chosen(connection, 4)
        ids = dict((await connection.execute(text("SELECT key, id FROM episodes"))).all())
        await delete_episode(connection, ids["t1"])
        aside = text("UPDATE episodes SET quarantined_reason = 'doubtful' WHERE key = 't2'")
        await connection.execute(aside)
        assert await numbers(connection, await chosen(connection, 4)) == {3}
        # It was chosen before.
        assert len(first) == 3
        assert await numbers(connection, first) == {3}


async def test_a_part_of_another_episode_that_is_set_aside_is_not_asked(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await recorded(connection, "t1", "t2")
        first = await chosen(connection, 4)
        joined = text(
            "UPDATE episodes SET root = (SELECT id FROM episodes WHERE key = 't2') WHERE key = 't1'"
        )
        await connection.execute(joined)
        assert await numbers(connection, await chosen(connection, 4)) == {2}
        aside = text("UPDATE episodes SET quarantined_reason = 'doubtful' WHERE key = 't2'")
        await connection.execute(aside)
        assert await numbers(connection, first) == set()


@pytest.mark.parametrize("tenant", [DEFAULT, "a"])
async def test_a_policy_is_asked_about_its_own_tenants_calls_alone(
    engine: AsyncEngine, tenant: str
) -> None:
    """Whatever a file of policies said once, by which another tenant's calls got its name."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m", "m", tenant)
        await trained(connection, 0)
        keys = [scoped(one, f"t{place}") for place, one in enumerate((DEFAULT, "a", "b"))]
        await recorded(connection, *keys)
        own = {DEFAULT: 0, "a": 1}[tenant]
        assert await numbers(connection, await chosen(connection, 4)) == {own}


async def test_one_call_of_each_episode_that_can_be_computed_again(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0)
        await recorded(connection, "t1")
        await recorded(connection, "t1", ago_s=BEFORE_S - 1)
        blind = call("t2", trainable=False, reason="no_token_ids", **ago(BEFORE_S))
        other = call("t3", policy="n", **ago(BEFORE_S, 1))
        await ingest(connection, [blind, other])
        assert await numbers(connection, await chosen(connection, 4)) == {1}
        assert len(await chosen(connection, 4)) == 1
