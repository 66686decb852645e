"""The curve of evaluation: the rewards of each version, with an interval."""

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.read.evaluations import rewards_of_work
from store.values.intervals import student, wilson
from tests.integration.store.evaluation.test_evaluation import curve, own, said, store
from tests.support.records import call, reward

# The curve


async def test_rewards_of_0_and_1_have_wilsons_interval(engine: AsyncEngine) -> None:
    for number in range(10):
        key = f"e{number}"
        await store(engine, call(key, split="eval", policy_version=3))
        await store(engine, reward(float(number < 7), episode=key))
    await store(engine, call("unscored", split="eval", policy_version=3), call("t"))
    [point] = await curve(engine)
    interval = wilson(0.7, 10)
    assert (point.policy, point.version, point.episodes, point.scored) == ("m", 3, 11, 10)
    assert (point.mean, point.low, point.high) == pytest.approx((0.7, *interval))


async def test_other_rewards_have_students_interval(engine: AsyncEngine) -> None:
    for key, value in (("a", 0.5), ("b", 1.0), ("c", -0.5)):
        await store(engine, call(key, split="eval"), reward(value, episode=key))
    [point] = await curve(engine, "m")
    interval = student(1 / 3, 0.763762615825973, 3)
    assert interval is not None
    assert (point.mean, point.low, point.high) == pytest.approx((1 / 3, *interval))
    assert await curve(engine, "other") == []


async def test_a_single_reward_that_is_not_0_or_1_has_no_interval(engine: AsyncEngine) -> None:
    await store(engine, call("a", split="eval"), reward(0.5, episode="a"))
    [point] = await curve(engine)
    assert (point.mean, point.low, point.high) == (0.5, None, None)


async def test_the_newest_reward_of_an_episode_counts(engine: AsyncEngine) -> None:
    record = own("a", "eval", response_id="r")
    await store(engine, record, reward(1.0, episode="a", at=1), reward(0.0, response="r", at=2))
    await store(engine, reward(1.0, episode="a", at=0))
    assert [point.mean for point in await curve(engine)] == [0.0]


async def test_rewards_for_calls_count_by_their_mean_where_there_is_no_other(
    engine: AsyncEngine,
) -> None:
    calls = [call("a", split="eval"), call("a", split="eval")]
    await store(engine, *calls)
    for record, value in zip(calls, (0.0, 0.5), strict=True):
        await store(engine, reward(value, call=str(record.id)))
    assert [point.mean for point in await curve(engine)] == [0.25]
    await store(engine, reward(1.0, episode="a"))
    assert [point.mean for point in await curve(engine)] == [1.0]


async def test_an_episode_counts_for_each_policy_by_the_version_of_its_first_call(
    engine: AsyncEngine,
) -> None:
    await store(
        engine,
        call("a", split="eval", policy="outside", policy_version=None),
        call("a", split="eval", policy="writer", policy_version=2),
        call("a", split="eval", policy="checker", policy_version=5),
        call("a", split="eval", policy="writer", policy_version=3),
        reward(1.0, episode="a"),
    )
    found = [(point.policy, point.version, point.mean) for point in await curve(engine)]
    assert found == [("checker", 5, 1.0), ("writer", 2, 1.0)]


async def test_joined_parts_are_one_episode_of_the_curve(engine: AsyncEngine) -> None:
    told = said("1")
    await store(engine, own("a", "eval", provides=(told,)), own("b", "eval", needs=(told,)))
    await store(engine, reward(1.0, episode="b"))
    [point] = await curve(engine)
    assert (point.episodes, point.scored, point.mean) == (1, 1, 1.0)


async def test_rewards_that_are_too_large_to_be_squared_are_no_error(engine: AsyncEngine) -> None:
    for key, value in (("a", 1.7e308), ("b", 1.7e308), ("c", -1.7e308)):
        await store(engine, call(key, split="eval"), reward(value, episode=key))
    [point] = await curve(engine)
    assert point.mean == pytest.approx(1e100 / 3)


async def test_the_work_of_each_version_has_a_curve_too(engine: AsyncEngine) -> None:
    work = [("a", 0, 0.0), ("b", 1, 1.0), ("c", 1, 0.5)]
    for key, version, value in work:
        await store(engine, call(key, policy_version=version), reward(value, episode=key))
    await store(engine, call("a", policy_version=2), call("unscored", policy_version=1))
    await store(engine, call("asked", split="eval", policy_version=1), reward(1.0, episode="asked"))
    await store(engine, call("asked", policy="other"), call("c", policy="other", policy_version=7))
    async with engine.connect() as connection:
        worked = await rewards_of_work(connection)
    assert [(p.policy, p.version, p.episodes, p.scored, p.mean) for p in worked] == [
        ("m", 0, 1, 1, 0.0),
        ("m", 1, 3, 2, 0.75),
        ("other", 7, 1, 1, 0.5),
    ]
