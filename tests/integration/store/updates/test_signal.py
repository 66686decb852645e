"""An update waits for groups that differ, or for successes; others are consumed, never piled up."""

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.claim_query import ClaimRule, lock_ready_episodes, waiting_updates
from store.claims import Claim, expire_episodes
from tests.support.ledger.episodes import ingest, keys, store
from tests.support.ledger.lineage import promote, trained
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
        "max_age_s": PATIENT,
        "needs_spread": True,
    }
    return ClaimRule(**fields | changes)


async def group(engine: AsyncEngine, task: str, *values: float, at: int = 0) -> None:
    for member, value in enumerate(values):
        name = f"{task}{member}"
        await store(engine, call(name, task=task), reward(value, episode=name, at=at))


@pytest.mark.parametrize(("fresh", "stale", "takes"), [(3, 1, 4), (1, 3, 4), (1, 2, 0), (4, 1, 4)])
async def test_stale_member_fills_its_group_and_does_not_expire_while_it_waits(
    engine: AsyncEngine, fresh: int, stale: int, takes: int
) -> None:
    """As most of the control's are; it is compared with, and consumed untrained."""
    for member in range(fresh + stale):
        name, version = str(member), int(member < fresh)
        made = call(name, task="t", policy_version=version)
        await store(engine, made, reward(float(member == 0), episode=name))
    patient, hasty = (
        rule(group_size=4, groups=1, max_staleness=0, max_age_s=age_s) for age_s in (PATIENT, NOW)
    )
    async with engine.begin() as connection:
        assert len(await lock_ready_episodes(connection, patient, 1)) == takes
        await trained(connection, 0)
        await promote(connection, "m", 1)
        # So it does not expire while its group may become whole.
        assert await expire_episodes(connection, patient, 1, {}) == {}
        assert await expire_episodes(connection, hasty, 1, {}) == {"stale": stale}


@pytest.mark.parametrize(
    ("fresh", "stale", "earlier", "has_signal"),
    [
        # Only a group that is short of members is compared with those that were consumed.
        ([1, 1, 1], [1], [0], False),
        ([1, 1, 1], [0], [1], True),
        ([1, 1, 1], [1], [], False),
        ([1, 1], [0], [], True),
        ([1, 1], [1], [0], True),
        # No stale one is taken into a group of fresh ones.
        ([1, 1, 1, 1], [0], [], False),
    ],
)
async def test_stale_member_gives_signal_to_a_group_short_of_fresh_members(
    engine: AsyncEngine, fresh: list[int], stale: list[int], earlier: list[int], has_signal: bool
) -> None:
    hasty = rule(group_size=4, groups=1, max_age_s=NOW, fewest=1)
    for kind, values, version in (("e", earlier, 1), ("f", fresh, 1), ("s", stale, 0)):
        for member, value in enumerate(values):
            name = f"{kind}{member}"
            made = call(name, task="t", policy_version=version)
            await store(engine, made, reward(value, episode=name))
        if kind == "e" and earlier:
            claim = await claimed(engine, hasty)
            assert claim is not None
            await consume_all(engine, claim)
    for member in range(4):
        name = f"same{member}"
        made = call(name, task="same", policy_version=1)
        await store(engine, made, reward(1.0, episode=name))
    async with engine.begin() as connection:
        taken = await lock_ready_episodes(connection, hasty, 1)
    # One without signal is taken along with one that has it, else only one of both is taken.
    assert (len(taken) > 4) is has_signal


def tasks(claim: Claim | None) -> list[str]:
    return [] if claim is None else [group.task for group in claim.groups]


async def test_groups_without_spread_do_not_make_an_update(engine: AsyncEngine) -> None:
    await group(engine, "same", 1.0, 1.0)
    await group(engine, "a", 1.0, 0.0)
    assert await claimed(engine, rule()) is None
    assert tasks(await claimed(engine, rule(needs_spread=False))) == ["a", "same"]


async def test_update_takes_waiting_groups_without_spread_along(engine: AsyncEngine) -> None:
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


async def test_enough_groups_without_spread_are_consumed_while_few_have_spread(
    engine: AsyncEngine,
) -> None:
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


async def test_groups_without_spread_wait_for_a_whole_update_at_any_age(
    engine: AsyncEngine,
) -> None:
    await group(engine, "same1", 1.0, 1.0)
    old = rule(max_age_s=NOW, fewest=1)
    assert await claimed(engine, old) is None
    await group(engine, "same2", 1.0, 1.0)
    assert tasks(await claimed(engine, old)) == ["same1", "same2"]


async def test_too_few_episodes_for_an_update_are_not_claimed_at_any_age(
    engine: AsyncEngine,
) -> None:
    await group(engine, "a", 1.0, 0.0)
    assert await claimed(engine, rule(max_age_s=NOW)) is None
    assert tasks(await claimed(engine, rule(max_age_s=NOW, fewest=2))) == ["a"]


async def test_update_of_the_smallest_size_takes_groups_without_spread_along(
    engine: AsyncEngine,
) -> None:
    await group(engine, "same", 1.0, 1.0)
    await group(engine, "a", 1.0, 0.0)
    assert tasks(await claimed(engine, rule(fewest=2))) == ["a", "same"]


async def test_newest_of_corrected_rewards_is_compared(engine: AsyncEngine) -> None:
    await group(engine, "a", 1.0, 0.0)
    await group(engine, "b", 1.0, 1.0)
    await store(engine, reward(1.0, episode="a1", at=5), reward(0.25, episode="a1", at=2))
    await store(engine, reward(0.5, episode="b0", at=5))
    assert tasks(await claimed(engine, rule(groups=1))) == ["a", "b"]
    async with engine.connect() as connection:
        query = text("SELECT key, reward FROM episodes ORDER BY key")
        found = {row.key: row.reward for row in await connection.execute(query)}
    assert found == {"a0": 1.0, "a1": 1.0, "b0": 0.5, "b1": 1.0}


async def test_lowest_of_simultaneous_rewards_counts(engine: AsyncEngine) -> None:
    await group(engine, "a", 1.0, 1.0)
    await store(engine, reward(0.25, episode="a1"), reward(0.5, episode="a1"))
    await group(engine, "b", 1.0, 1.0)
    assert tasks(await claimed(engine, rule(groups=1, group_size=2))) == ["a", "b"]
    async with engine.connect() as connection:
        found = await connection.scalar(text("SELECT reward FROM episodes WHERE key = 'a1'"))
    assert found == 0.25


async def test_late_group_member_has_spread_with_consumed_members(engine: AsyncEngine) -> None:
    await group(engine, "t", 1.0, 1.0)
    first = await claimed(engine, rule(groups=1))
    assert first is not None
    await consume_all(engine, first)
    for task in ("same1", "same2", "same3"):
        await group(engine, task, 1.0, 1.0)
    late = rule(group_size=3, groups=1, max_age_s=NOW, fewest=1)
    await store(engine, call("late", task="t"), reward(0.0, episode="late"))
    # It counts as one that differs: of the others, as many as make an update are taken along.
    assert tasks(await claimed(engine, late)) == ["same1", "same2", "t"]


async def test_failed_episode_gives_spread_by_its_failed_reward(engine: AsyncEngine) -> None:
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


async def test_failed_episode_is_not_the_best_of_a_group_with_lower_rewards(
    engine: AsyncEngine,
) -> None:
    await store(
        engine,
        call("bad", task="t"),
        reward(-1.0, episode="bad"),
        call("failed", task="t", http_status=400),
    )
    await group(engine, "same", 1.0, 1.0)
    lowest = rule(groups=1, failed_after_s=0.0, failed_reward=0.0, max_age_s=PATIENT)
    # Neither differs: one is taken by itself.
    assert len(tasks(await claimed(engine, lowest))) == 1


# Single episodes, and tasks that come several times


async def rated(engine: AsyncEngine, *values: float, task: str | None = "{n}", at: int = 0) -> None:
    for n, value in enumerate(values):
        name = f"{task}-{at}-{n}"
        named = None if task is None else task.format(n=n)
        await store(engine, call(name, task=named), reward(value, episode=name, at=at))


@pytest.mark.parametrize("task", [None, "once/{n}"])
async def test_episodes_of_unrepeated_tasks_are_claimable_at_once_and_count_singly(
    engine: AsyncEngine, task: str | None
) -> None:
    await rated(engine, 1.0, 1.0, 1.0, task=task)
    assert await claimed(engine, rule()) is None
    await rated(engine, 1.0, task=task and task + "x", at=1)
    assert len(keys(await claimed(engine, rule()))) == 4


async def test_groups_and_single_episodes_share_an_update(engine: AsyncEngine) -> None:
    """Each counts by its number, and none of them waits for its own kind."""
    await group(engine, "a", 1.0, 0.0)
    await rated(engine, 1.0, 0.0, task=None)
    assert await claimed(engine, rule(groups=3)) is None
    assert len(keys(await claimed(engine, rule(groups=2)))) == 4


async def test_single_episode_waits_for_others_of_its_task_only_if_tasks_repeat(
    engine: AsyncEngine,
) -> None:
    """Of nineteen named tasks, one episode in ten shares its own with another, or fewer do."""
    await rated(engine, *[1.0] * 19, task="once/{n}")
    await group(engine, "twice", 1.0, 0.0)
    of = rule(group_size=2, groups=40, fewest=1)
    assert len(keys(await claimed(engine, of))) == 21
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE episode_policies SET claimed_by = NULL"))
        await connection.execute(text("UPDATE updates SET state = 'abandoned'"))
    await group(engine, "again", 1.0, 0.0)
    assert tasks(await claimed(engine, of)) == ["again", "twice"]


async def test_single_episode_among_repeated_tasks_is_claimable_after_max_age(
    engine: AsyncEngine,
) -> None:
    await group(engine, "a", 1.0, 0.0)
    await group(engine, "b", 1.0)
    assert tasks(await claimed(engine, rule(fewest=1, max_age_s=NOW))) == ["a", "b"]


async def test_tasks_that_repeat_only_among_consumed_episodes_count_as_repeated(
    engine: AsyncEngine,
) -> None:
    for task in ("a", "b"):
        await group(engine, task, 1.0, 0.0)
    first = await claimed(engine, rule())
    assert first is not None
    await consume_all(engine, first)
    await group(engine, "c", 1.0)
    assert await claimed(engine, rule(fewest=1)) is None


async def test_single_task_of_all_episodes_makes_several_groups(
    engine: AsyncEngine,
) -> None:
    """As where agents say what differs in their instructions alone."""
    await group(engine, "only", *[1.0, 0.0] * 4)
    claim = await claimed(engine, rule(groups=3))
    assert len(keys(claim)) == 6
    assert tasks(claim) == ["only"]


async def test_update_takes_no_more_episodes_than_a_whole_update(engine: AsyncEngine) -> None:
    await rated(engine, *[1.0, 0.0] * 9, task=None)
    assert len(keys(await claimed(engine, rule(group_size=8, groups=2, fewest=4)))) == 16


# An update that imitates waits for successes; failures are consumed, and do not pile up


def success(**changes: Any) -> ClaimRule:
    return rule(**{"needs_spread": False, "least_reward": 1.0} | changes)


SINGLE: dict[str, Any] = {"group_size": 1}


async def episodes(engine: AsyncEngine, *values: float | None, at: int = 0) -> None:
    for number, value in enumerate(values):
        name = f"e{at}-{number}"
        await store(engine, call(name, task=name))
        if value is not None:
            await store(engine, reward(value, episode=name, at=at))


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


async def test_groups_without_a_success_do_not_make_an_update(engine: AsyncEngine) -> None:
    """Their rewards differ, and none is enough."""
    await group(engine, "low", 0.9, 0.0)
    await group(engine, "a", 1.0, 0.0)
    assert await claimed(engine, success()) is None
    assert await waiting(engine, success()) == 0.5
    assert tasks(await claimed(engine, success(least_reward=0.9))) == ["a", "low"]


async def test_episodes_without_success_are_claimed_with_successes_or_by_themselves(
    engine: AsyncEngine,
) -> None:
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


async def test_success_of_a_large_task_is_claimed_first(
    engine: AsyncEngine,
) -> None:
    await group(engine, "a", 1.0, 0.0, 0.0, 0.0, 0.0)
    await store(engine, reward(0.0, episode="a4", at=600))
    claim = await claimed(engine, success(groups=1))
    # With one of them a group counts, and another is taken along.
    assert "a0" in keys(claim)
    assert len(keys(claim)) == 4


async def test_consumed_success_does_not_count_as_waiting(engine: AsyncEngine) -> None:
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
async def test_failed_episodes_are_claimed_with_any_failed_reward(
    engine: AsyncEngine, value: float
) -> None:
    for name in ("x", "y"):
        await store(engine, call(name, task="t", http_status=400, trainable=False, reason="empty"))
    of = success(groups=1, failed_after_s=NOW, failed_reward=value)
    assert sorted(keys(await claimed(engine, of))) == ["x", "y"]
    assert sorted(keys(await claimed(engine, of))) == []


async def test_update_waits_for_enough_successes_among_single_episodes(engine: AsyncEngine) -> None:
    of = success(groups=2, **SINGLE)
    await episodes(engine, 1.0, 0.0, None)
    assert await claimed(engine, of) is None
    assert await waiting(engine, of) == 0.5
    await episodes(engine, 2.0, at=60)
    assert await waiting(engine, of) == 1.0
    assert sorted(keys(await claimed(engine, of))) == ["e0-0", "e0-1", "e60-0"]


async def test_single_episodes_without_success_are_consumed_while_successes_wait(
    engine: AsyncEngine,
) -> None:
    of = success(groups=2, **SINGLE)
    await episodes(engine, 1.0, 0.0, 0.5, 0.0)
    first = await claimed(engine, of)
    assert first is not None
    assert sorted(keys(first)) == ["e0-1", "e0-2"]
    await consume_all(engine, first)
    assert await claimed(engine, of) is None


# What counts as waiting


@pytest.mark.parametrize(
    ("group_size", "groups", "updates"), [(2, 1, 6.5), (2, 2, 3.25), (3, 1, 13 / 3)]
)
async def test_ready_episodes_count_as_waiting(
    engine: AsyncEngine, group_size: int, groups: int, updates: float
) -> None:
    """Tasks of 4, 3 and 1 scored episodes, and one of 5 that nobody named; others do not count."""
    records = []
    for number, task in enumerate(["a"] * 4 + ["b"] * 3 + ["c"] + [None] * 5):
        records += [call(f"e{number}", task=task), reward(1.0, episode=f"e{number}")]
    records += [call(f"open{number}", task="a") for number in range(9)]
    for number in range(9):
        records += [call(f"o{number}", task="a", policy="other"), reward(1.0, episode=f"o{number}")]
    rule = ClaimRule(policy="m", group_size=group_size, groups=groups, max_age_s=1.0)
    async with engine.begin() as connection:
        await ingest(connection, records)
        assert await waiting_updates(connection, rule) == updates


async def test_without_groups_every_scored_episode_counts_as_waiting(engine: AsyncEngine) -> None:
    rule = ClaimRule(policy="m", group_size=1, groups=4, max_age_s=1.0)
    async with engine.begin() as connection:
        assert await waiting_updates(connection, rule) == 0
        for number, task in enumerate(["a", "a", None, None, None, "b"]):
            made = [call(f"e{number}", task=task), reward(1.0, episode=f"e{number}")]
            await ingest(connection, made)
        assert await waiting_updates(connection, rule) == 1.5
