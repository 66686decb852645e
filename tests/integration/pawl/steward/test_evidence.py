"""What a judgement rests on: the same whoever reads it and when, and none of it left out."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.steward.evidence import KNOWN, OnTrial
from store.read.arms import ArmPart, arm_episodes
from store.read.standing import Gated, Standing
from store.records import ARMS, Arm
from store.write.ingest import Ingester
from tests.support.steward.arrivals import (
    BEGAN,
    DELAY,
    RULE,
    VERSIONS,
    Arrival,
    begun,
    said,
    version,
)

MEANS: dict[Arm, float] = {"base": 0.4, "serving": 0.5, "canary": 0.6}


def trial() -> OnTrial:
    """A steward's that begins now."""
    since = BEGAN - KNOWN
    serving = Standing(version=version(1, "serving"), gate=RULE, since=since)
    canary = Standing(version=version(2, "canary"), gate=RULE, since=since)
    return OnTrial(Gated(now=BEGAN, frozen=False, serving=serving, canary=canary), canary)


def traffic(random: Random, count: int) -> Iterator[Arrival]:
    """Episodes whose rewards come in time or late, and are corrected, or never come."""
    for number in range(count):
        at = BEGAN + timedelta(seconds=random.uniform(0, 1500))
        arm = random.choice(ARMS)
        key = f"{arm}-{number}"
        yield begun(key, arm, at, number)
        for _ in range(random.choice([0, 1, 1, 1, 2])):
            value = float(random.random() < MEANS[arm])
            yield said(key, value, at + random.uniform(0.01, 1.6) * DELAY)


async def figures(engine: AsyncEngine, trial: OnTrial, now: datetime) -> dict[str, Any]:
    """What a look comes to."""
    async with engine.connect() as connection:
        return trial.evidence(await trial.decide(connection, now))


@pytest.mark.parametrize("seed", range(5))
async def test_a_steward_that_ran_on_and_one_that_was_restarted_come_to_the_same(
    engine: AsyncEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    arrivals = sorted(traffic(random, 150), key=lambda one: one.at)
    looks = sorted(BEGAN + timedelta(seconds=random.uniform(0, 3200)) for _ in range(12))
    ran_on = restarted = trial()
    ingester, undecided = Ingester(), 0
    for now in looks:
        come = [one.record for one in arrivals if one.at <= now]
        arrivals = [one for one in arrivals if one.at > now]
        random.shuffle(come)
        await ingester.store(engine, come)
        monkeypatch.setattr("pawl.steward.evidence.MOST", random.choice([1, 7, 50, 100_000]))
        if random.random() < 0.4:
            restarted = trial()
        found = await figures(engine, ran_on, now)
        assert found == await figures(engine, restarted, now)
        undecided += found["decision"]["kind"] == "wait"
    assert undecided
    # All that came later than the last look changes nothing of what had counted by then.
    await ingester.store(engine, [one.record for one in arrivals])
    fresh = trial()
    assert await figures(engine, fresh, now) == await figures(engine, ran_on, now)
    counted = found["decision"]["arms"]
    assert sum(one["episodes"] for one in counted.values()) > 50
    assert sum(one["unscored"] for one in counted.values()) > 10


async def test_what_serves_is_not_judged_by_what_it_was_given_as_a_canary(
    engine: AsyncEngine,
) -> None:
    """Nor a canary by what a proxy that lags took it for."""
    arrivals = []
    for number in range(30):
        arm, at = ARMS[number % 3], BEGAN + timedelta(seconds=number)
        arrivals += [begun(f"own-{number}", arm, at, number)]
        of_another_time: Arm = "canary" if arm == "serving" else "serving"
        arrivals += [begun(f"other-{number}", of_another_time, at, 100 + number, VERSIONS[arm])]
    await Ingester().store(engine, [one.record for one in arrivals])
    found = await figures(engine, trial(), BEGAN + 2 * DELAY)
    counted = {arm: one["episodes"] for arm, one in found["decision"]["arms"].items()}
    assert counted == dict.fromkeys(ARMS, 10)


async def test_what_cannot_be_read_in_the_time_of_a_look_is_read_in_shorter_parts(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look is given up in the middle of a part, as reading more than three takes too long."""
    at = [BEGAN + timedelta(seconds=number) for number in range(30)]
    arrivals = [begun(f"e-{n}", ARMS[n % 3], one, n) for n, one in enumerate(at)]
    await Ingester().store(engine, [one.record for one in arrivals])
    given_up = 0

    async def slow(*words: Any, most: int, **more: Any) -> ArmPart:
        if most > 3:
            raise TimeoutError
        return await arm_episodes(*words, most=most, **more)

    monkeypatch.setattr("pawl.steward.evidence.arm_episodes", slow)
    monkeypatch.setattr("pawl.steward.evidence.MOST", 20)
    looks = trial()
    found = None
    while found is None:
        try:
            found = await figures(engine, looks, BEGAN + 2 * DELAY)
        except TimeoutError:
            given_up += 1
    # Three parts are too long at first, and one after each that was not.
    assert 3 <= given_up < 30
    assert sum(one["episodes"] for one in found["decision"]["arms"].values()) == 30


async def test_what_takes_longer_to_read_than_it_takes_to_get_old_is_read_to_its_end(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: Any, **__: Any) -> ArmPart:
        raise TimeoutError

    looks, end = trial(), BEGAN + 2 * DELAY
    with monkeypatch.context() as patched:
        patched.setattr("pawl.steward.evidence.arm_episodes", slow)
        with pytest.raises(TimeoutError):
            await figures(engine, looks, end)
    assert not looks.is_old(end + timedelta(days=1))
    await figures(engine, looks, end)
    assert not looks.is_old(end - timedelta(seconds=1))
    assert looks.is_old(end)
