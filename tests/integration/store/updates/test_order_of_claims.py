"""Whom a claim takes first: the latest rewards, whichever version sampled the episodes."""

from random import Random
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.durations.load import Episode
from benchmarks.durations.waiting import Waiting, latest_minute_first
from store.records import SpoolRecord
from store.updates.ready import ClaimRule, _ready_of, _singles_of
from store.version_states import ensure_base
from store.write.ingest import ingest
from tests.support.ledger.updates import claimed
from tests.support.records import START, call, reward

PATIENT = 1e9
RULE: dict[str, Any] = {"policy": "m", "smallest_group": 2, "max_age_s": PATIENT}


async def store(engine: AsyncEngine, episodes: list[Episode]) -> None:
    records: list[SpoolRecord] = []
    for one in episodes:
        key = f"e{one.number}"
        records.append(call(key, task=f"t{one.task:03}", policy_version=one.version))
        records.append(reward(one.reward, episode=key, at=int(one.scored)))
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ingest(connection, records)


def made(number: int, task: int, scored: float, reward: float, version: int) -> Episode:
    one = Episode(number, task, 0.0, 0.0, scored, reward)
    one.version = version
    return one


async def test_an_episode_of_half_an_hour_is_not_left_over_for_its_version(
    engine: AsyncEngine,
) -> None:
    long = [made(0, 0, 700.0, 0.0, 0), made(1, 0, 700.0, 1.0, 0)]
    short = [made(2, 1, 600.0, 0.0, 9), made(3, 1, 600.0, 1.0, 9)]
    await store(engine, [*long, *short])
    claim = await claimed(engine, ClaimRule(**RULE, group_size=2, groups=1), parent=9)
    assert claim is not None
    assert [group.task for group in claim.groups] == ["t000"]


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("seed", range(3))
async def test_the_simulated_order_is_that_of_the_store(
    engine: AsyncEngine, seed: int, group_size: int
) -> None:
    """`benchmarks.durations` says in Python what `store.updates.ready` says in SQL."""
    chance = Random(seed)
    episodes = [
        made(
            number,
            number if group_size == 1 else chance.randrange(12),
            float(chance.randrange(600)),
            float(chance.randrange(2)),
            chance.randrange(5),
        )
        for number in range(90)
    ]
    await store(engine, episodes)
    rule = ClaimRule(**RULE, group_size=group_size, groups=4, needs_spread=group_size > 1)
    waiting = Waiting(rule, latest_minute_first)
    for one in episodes:
        waiting.add(one)
    claim = await claimed(engine, rule, parent=5)
    assert claim is not None
    held = {one.key for group in claim.groups for one in group.episodes}
    taken = waiting.claim(START.timestamp(), 0, whole=False)
    assert held == {f"e{one.number}" for _, group in taken for one in group}


async def test_groups_of_one_are_found_without_sorting_what_waits(engine: AsyncEngine) -> None:
    await store(engine, [made(n, n, float(n), 1.0, 0) for n in range(3)])
    rule = ClaimRule(**RULE, group_size=1, groups=2)
    ready, values = _ready_of(rule, "")
    async with engine.begin() as connection:
        # Of three rows the planner would rather read the table.
        for kind in ("seqscan", "bitmapscan"):
            await connection.execute(text(f"SET LOCAL enable_{kind} = off"))
        plan = await connection.execute(
            text(f"EXPLAIN {_singles_of(rule, ready).text}"),
            values | {"policy": "m", "oldest": 0, "groups": rule.groups},
        )
        steps = "\n".join(plan.scalars())
    assert "ix_episode_policies_latest" in steps
    assert "Sort" not in steps
