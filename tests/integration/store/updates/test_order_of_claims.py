"""Whom a claim takes first: the latest rewards, whichever version sampled the episodes."""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.claim_query import ClaimRule, chosen_groups
from store.records import SpoolRecord
from store.version_states import ensure_base
from tests.support.ledger.episodes import ingest
from tests.support.ledger.updates import claimed
from tests.support.records import call, reward

PATIENT = 1e9
RULE: dict[str, Any] = {"policy": "m", "max_age_s": PATIENT}


class Episode(NamedTuple):
    """A scored episode; `scored` in seconds after the first."""

    number: int
    task: int
    scored: float
    reward: float
    version: int


class Waiting(NamedTuple):
    """A whole group, as `chosen_groups` looks at it."""

    episodes: Sequence[Episode]
    members: int
    has_signal: bool


def latest_first(episodes: Sequence[Episode]) -> tuple[float, int, float, int]:
    """The order of groups: by the minute of the latest reward, then newest version, then age."""
    minute = max(one.scored for one in episodes) // 60
    newest = max(one.version for one in episodes)
    return -minute, -newest, min(one.scored for one in episodes), episodes[0].task


def expected_claim(episodes: Sequence[Episode], rule: ClaimRule) -> set[str]:
    """The keys of the episodes that the next update takes, computed without a database."""
    by_task: dict[int, list[Episode]] = {}
    for one in episodes:
        by_task.setdefault(one.task, []).append(one)
    ready = []
    for of_task in by_task.values():
        members = sorted(
            of_task, key=lambda one: (-(one.scored // 60), -one.version, one.scored, one.number)
        )
        size = rule.group_size
        for start in range(0, len(members) - size + 1, size):
            group = members[start : start + size]
            differs = size == 1 or len({one.reward for one in group}) > 1
            ready.append(Waiting(group, size, differs))
    ready.sort(key=lambda group: latest_first(group.episodes))
    for has_signal in (True, False):
        for beyond in [one for one in ready if one.has_signal == has_signal][rule.groups :]:
            ready.remove(beyond)
    return {f"e{one.number}" for group in chosen_groups(ready, rule) for one in group.episodes}


async def store(engine: AsyncEngine, episodes: list[Episode]) -> None:
    records: list[SpoolRecord] = []
    for one in episodes:
        key = f"e{one.number}"
        records.append(call(key, task=f"t{one.task:03}", policy_version=one.version))
        records.append(reward(one.reward, episode=key, at=int(one.scored)))
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ingest(connection, records)


async def test_group_with_the_latest_rewards_is_claimed_despite_an_older_version(
    engine: AsyncEngine,
) -> None:
    long = [Episode(0, 0, 700.0, 0.0, 0), Episode(1, 0, 700.0, 1.0, 0)]
    short = [Episode(2, 1, 600.0, 0.0, 9), Episode(3, 1, 600.0, 1.0, 9)]
    await store(engine, [*long, *short])
    claim = await claimed(engine, ClaimRule(**RULE, group_size=2, groups=1), parent=9)
    assert claim is not None
    assert [group.task for group in claim.groups] == ["t000"]


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("seed", range(3))
async def test_claim_takes_groups_with_the_latest_rewards_first(
    engine: AsyncEngine, seed: int, group_size: int
) -> None:
    chance = Random(seed)
    episodes = [
        Episode(
            number,
            number if group_size == 1 else chance.randrange(12),
            float(chance.randrange(600)),
            float(chance.randrange(2)),
            chance.randrange(5),
        )
        for number in range(90)
    ]
    await store(engine, episodes)
    rule = ClaimRule(**RULE, group_size=group_size, groups=4, needs_spread=True)
    claim = await claimed(engine, rule, parent=5)
    assert claim is not None
    held = {one.key for group in claim.groups for one in group.episodes}
    assert held == expected_claim(episodes, rule)
