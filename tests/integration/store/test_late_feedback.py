"""Feedback after training: kept, marked where it is read, counted, and live figures have it."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.link.claimable import set_reward_rule
from store.read.evaluations import rewards_by_version
from store.read.lines import encoded_line
from store.records import Episode, FeedbackRecord
from store.values.rewards import RewardRule, RewardTerm
from store.write.ingest import Ingester
from tests.integration.store.test_groups import SINGLE
from tests.support.ledger.episodes import episodes, keys, store
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, statement

RIGHT = RewardRule(terms=(RewardTerm(metric="right", low=0.0, high=1.0),))


def later(record: FeedbackRecord) -> FeedbackRecord:
    """The same, said a minute from now."""
    return msgspec.structs.replace(record, at=datetime.now(UTC) + timedelta(minutes=1))


async def by_key(engine: AsyncEngine) -> dict[str, Episode]:
    return {one.key: one for one in await episodes(engine)}


async def trained(engine: AsyncEngine, *names: str) -> None:
    """Episodes of one call each, rewarded and trained on."""
    for name in names:
        await store(engine, call(name), statement("reward", 0.0, episode=name))
    claim = await claimed(engine, msgspec.structs.replace(SINGLE, groups=len(names)))
    assert claim is not None
    assert sorted(keys(claim)) == sorted(names)
    await consume_all(engine, claim, version=1)


async def test_late_feedback_is_marked_counted_and_part_of_live_figures(
    engine: AsyncEngine,
) -> None:
    told: Counter[str] = Counter()
    await trained(engine, "a", "b")
    await store(engine, call("untrained"), statement("reward", 0.5, episode="untrained"))
    late = [
        later(statement("reward", 1.0, episode="a")),
        later(statement("note", "odd", episode="a")),
        later(statement("reward", 0.5, episode="untrained")),
        statement("reward", 0.25, at=1, episode="b"),
    ]
    await Ingester(on_late=told.update).store(engine, late)
    assert told == {"m": 1}
    found = await by_key(engine)
    assert [one.late for one in found["a"].feedback] == [False, True, True]
    assert not any(one.late for name in ("b", "untrained") for one in found[name].feedback)
    line = msgspec.json.decode(encoded_line(found["a"], datetime.now(UTC)))
    assert [one.get("late") for one in line["feedback"]] == [None, True, True]
    async with engine.connect() as connection:
        [work] = await rewards_by_version(connection, split="train")
    assert (work.scored, work.mean) == (3, pytest.approx((1.0 + 0.25 + 0.5) / 3))


async def test_only_metrics_of_the_policys_reward_count_as_late_and_only_once(
    engine: AsyncEngine,
) -> None:
    told: Counter[str] = Counter()
    await trained(engine, "a")
    async with engine.begin() as connection:
        await set_reward_rule(connection, "m", RIGHT)
    ingester = Ingester(on_late=told.update)
    said = [later(statement(metric, 1.0, episode="a")) for metric in ("reward", "right", "note")]
    for _ in range(2):
        await ingester.store(engine, said)
    assert told == {"m": 1}


async def test_reward_withdrawn_after_training_leaves_the_reward_curve(
    engine: AsyncEngine,
) -> None:
    await trained(engine, "a", "b")
    await store(engine, later(statement("reward", None, episode="a")))
    async with engine.connect() as connection:
        [work] = await rewards_by_version(connection, split="train")
    assert (work.episodes, work.scored) == (2, 1)
