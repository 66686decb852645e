"""An update waits for groups whose rewards differ; the others are consumed, and do not pile up."""

from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.claims import Claim
from store.ready import ClaimRule
from tests.support.ledger.episodes import store
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward

# Rewards in these tests were stated long ago.
PATIENT = 1e9
NOW = 1e-6


def rule(**changes: Any) -> ClaimRule:
    fields: dict[str, Any] = {
        "policy": "m",
        "group_size": 2,
        "groups": 2,
        "smallest_group": 2,
        "max_age_s": PATIENT,
        "needs_spread": True,
    }
    return ClaimRule(**fields | changes)


async def group(engine: AsyncEngine, task: str, *values: float, at: int = 0) -> None:
    for member, value in enumerate(values):
        name = f"{task}{member}"
        await store(engine, call(name, task=task), reward(value, episode=name, at=at))


def tasks(claim: Claim | None) -> list[str]:
    return [] if claim is None else [group.task for group in claim.groups]


async def test_groups_without_spread_do_not_make_an_update(engine: AsyncEngine) -> None:
    await group(engine, "same", 1.0, 1.0)
    await group(engine, "a", 1.0, 0.0)
    assert await claimed(engine, rule()) is None
    assert tasks(await claimed(engine, rule(needs_spread=False))) == ["a", "same"]


async def test_an_update_takes_as_many_of_them_along(engine: AsyncEngine) -> None:
    for number, task in enumerate(("same1", "same2", "same3")):
        await group(engine, task, 1.0, 1.0, at=number)
    # Three are enough by themselves; one is consumed first.
    first = await claimed(engine, rule())
    assert tasks(first) == ["same1", "same2"]
    assert first is not None
    await consume_all(engine, first)
    for task in ("a", "b", "c"):
        await group(engine, task, 1.0, 0.0, at=9)
    assert tasks(await claimed(engine, rule())) == ["a", "b", "same3"]


async def test_enough_of_them_are_consumed_while_too_few_differ(engine: AsyncEngine) -> None:
    await group(engine, "a", 1.0, 0.0)
    await group(engine, "same1", 1.0, 1.0)
    await group(engine, "same2", 0.0, 0.0)
    claim = await claimed(engine, rule())
    assert tasks(claim) == ["same1", "same2"]
    assert claim is not None
    await consume_all(engine, claim)
    assert await claimed(engine, rule()) is None
    await group(engine, "b", 1.0, 0.5)
    assert tasks(await claimed(engine, rule())) == ["a", "b"]


async def test_once_one_has_waited_what_is_there_is_taken(engine: AsyncEngine) -> None:
    await group(engine, "same", 1.0, 1.0)
    assert tasks(await claimed(engine, rule(max_age_s=NOW))) == ["same"]


async def test_a_late_update_takes_those_along_that_waited_with_it(engine: AsyncEngine) -> None:
    await group(engine, "same", 1.0, 1.0)
    await group(engine, "a", 1.0, 0.0)
    assert tasks(await claimed(engine, rule(max_age_s=NOW))) == ["a", "same"]


async def test_of_corrected_rewards_the_newest_are_compared(engine: AsyncEngine) -> None:
    await group(engine, "a", 1.0, 0.0)
    await group(engine, "b", 1.0, 1.0)
    await store(engine, reward(1.0, episode="a1", at=5), reward(0.25, episode="a1", at=2))
    await store(engine, reward(0.5, episode="b0", at=5))
    assert tasks(await claimed(engine, rule(groups=1))) == ["a", "b"]
    async with engine.connect() as connection:
        query = text("SELECT key, reward FROM episodes ORDER BY key")
        found = {row.key: row.reward for row in await connection.execute(query)}
    assert found == {"a0": 1.0, "a1": 1.0, "b0": 0.5, "b1": 1.0}


async def test_of_rewards_said_at_once_the_lowest_counts(engine: AsyncEngine) -> None:
    await group(engine, "a", 1.0, 1.0)
    await store(engine, reward(0.25, episode="a1"), reward(0.5, episode="a1"))
    await group(engine, "b", 1.0, 1.0)
    assert tasks(await claimed(engine, rule(groups=1, group_size=2))) == ["a", "b"]
    async with engine.connect() as connection:
        found = await connection.scalar(text("SELECT reward FROM episodes WHERE key = 'a1'"))
    assert found == 0.25


async def test_a_late_member_differs_from_those_that_were_consumed(engine: AsyncEngine) -> None:
    await group(engine, "t", 1.0, 1.0)
    first = await claimed(engine, rule(max_age_s=NOW))
    assert first is not None
    await consume_all(engine, first)
    for task in ("same1", "same2", "same3"):
        await group(engine, task, 1.0, 1.0)
    late = rule(group_size=3, smallest_group=2, groups=1, max_age_s=NOW)
    await store(engine, call("late", task="t"), reward(0.0, episode="late"))
    # It counts as one that differs: of the others, one is taken along.
    assert tasks(await claimed(engine, late)) == ["same1", "t"]


async def test_a_failure_differs_by_what_the_recipe_gives_it(engine: AsyncEngine) -> None:
    broken: dict[str, Any] = {"http_status": 400}
    await store(
        engine,
        call("good", task="t"),
        reward(1.0, episode="good"),
        call("failed", task="t", **broken),
    )
    failing = rule(groups=1, failed_after_s=0.0)
    same, other = (
        rule(groups=1, failed_after_s=0.0, failed_reward=value, max_age_s=PATIENT)
        for value in (1.0, -1.0)
    )
    await group(engine, "same", 1.0, 1.0)
    assert failing.failed_reward is None
    assert tasks(await claimed(engine, other)) == ["same", "t"]
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE episode_policies SET claimed_by = NULL"))
        await connection.execute(text("UPDATE updates SET state = 'abandoned'"))
    # Of two groups that do not differ one is taken by itself.
    assert len(tasks(await claimed(engine, same))) == 1
