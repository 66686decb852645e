"""An update that imitates waits for successes; failures are consumed, and do not pile up."""

from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.claims import Claim
from store.ready import ClaimRule, waiting_updates
from tests.integration.store.updates.test_signal import NOW, group, rule, tasks
from tests.support.ledger.episodes import store
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward


def success(**changes: Any) -> ClaimRule:
    return rule(**{"needs_spread": False, "least_reward": 1.0} | changes)


SINGLE: dict[str, Any] = {"group_size": 1, "smallest_group": 1}


async def episodes(engine: AsyncEngine, *values: float | None, at: int = 0) -> None:
    for number, value in enumerate(values):
        name = f"e{at}-{number}"
        await store(engine, call(name, task=name))
        if value is not None:
            await store(engine, reward(value, episode=name, at=at))


def keys(claim: Claim | None) -> list[str]:
    return [] if claim is None else sorted(e.key for g in claim.groups for e in g.episodes)


async def waiting(engine: AsyncEngine, of: ClaimRule) -> float:
    async with engine.connect() as connection:
        return await waiting_updates(connection, of)


async def test_groups_of_successes_alone_make_an_update(engine: AsyncEngine) -> None:
    """They have no spread, and nothing is compared."""
    await group(engine, "a", 1.0, 1.0)
    assert await claimed(engine, success()) is None
    await group(engine, "b", 1.0, 2.0)
    assert await waiting(engine, success()) == 1.0
    assert tasks(await claimed(engine, success())) == ["a", "b"]


async def test_groups_without_a_success_do_not_make_one(engine: AsyncEngine) -> None:
    """Their rewards differ, and none is enough."""
    await group(engine, "low", 0.9, 0.0)
    await group(engine, "a", 1.0, 0.0)
    assert await claimed(engine, success()) is None
    assert await waiting(engine, success()) == 0.5
    assert tasks(await claimed(engine, success(least_reward=0.9))) == ["a", "low"]


async def test_failures_are_taken_along_or_by_themselves(engine: AsyncEngine) -> None:
    for task in ("low1", "low2"):
        await group(engine, task, 0.0, 0.0)
    await group(engine, "a", 1.0, 0.0)
    first = await claimed(engine, success())
    assert first is not None
    assert tasks(first) == ["low1", "low2"]
    await consume_all(engine, first)
    assert await claimed(engine, success()) is None
    await group(engine, "low3", 0.0, 0.0)
    await group(engine, "b", 0.0, 1.0)
    assert tasks(await claimed(engine, success())) == ["a", "b", "low3"]


async def test_of_a_task_with_many_episodes_successes_are_taken_first(
    engine: AsyncEngine,
) -> None:
    await group(engine, "a", 1.0, 0.0, 0.0, 0.0, 0.0)
    await store(engine, reward(0.0, episode="a4", at=600))
    claim = await claimed(engine, success(groups=1))
    assert "a0" in keys(claim)
    assert len(keys(claim)) == 2


async def test_a_success_that_was_consumed_is_no_success_that_waits(engine: AsyncEngine) -> None:
    await group(engine, "a", 1.0, 1.0)
    first = await claimed(engine, success(groups=1))
    assert first is not None
    await consume_all(engine, first)
    await store(engine, call("late", task="a"), reward(0.0, episode="late"))
    await group(engine, "b", 1.0, 0.0)
    # The late one is a group of its own, with what was consumed, and is taken along.
    assert tasks(await claimed(engine, success(groups=1, max_age_s=NOW))) == ["a", "b"]
    assert await waiting(engine, success()) == 0.0


@pytest.mark.parametrize("value", [0.0, 1.0])
async def test_a_failed_episode_is_worth_what_the_recipe_says(
    engine: AsyncEngine, value: float
) -> None:
    for name in ("x", "y"):
        await store(engine, call(name, task="t", http_status=400, trainable=False, reason="empty"))
    of = success(groups=1, failed_after_s=NOW, failed_reward=value)
    assert keys(await claimed(engine, of)) == ["x", "y"]
    assert keys(await claimed(engine, of)) == []


async def test_single_successes_are_waited_for(engine: AsyncEngine) -> None:
    of = success(groups=2, **SINGLE)
    await episodes(engine, 1.0, 0.0, None)
    assert await claimed(engine, of) is None
    assert await waiting(engine, of) == 0.5
    await episodes(engine, 2.0, at=60)
    assert await waiting(engine, of) == 1.0
    assert keys(await claimed(engine, of)) == ["e0-0", "e0-1", "e60-0"]


async def test_single_failures_are_consumed_while_successes_wait(engine: AsyncEngine) -> None:
    of = success(groups=2, **SINGLE)
    await episodes(engine, 1.0, 0.0, 0.5, 0.0)
    first = await claimed(engine, of)
    assert first is not None
    assert keys(first) == ["e0-1", "e0-2"]
    await consume_all(engine, first)
    assert await claimed(engine, of) is None


async def test_a_single_success_that_waited_long_is_enough(engine: AsyncEngine) -> None:
    await episodes(engine, 1.0)
    assert keys(await claimed(engine, success(**SINGLE, max_age_s=NOW))) == ["e0-0"]
    assert await claimed(engine, success(**SINGLE, max_age_s=NOW)) is None
