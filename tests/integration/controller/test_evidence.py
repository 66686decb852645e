"""Evidence of a comparison is complete, and the same for every reader at any time."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from random import Random
from typing import NamedTuple
from uuid import UUID

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from controller import evidence
from controller.comparison import Comparison, Figures
from controller.evidence import PROXIES_KNOW_AFTER, Evidence
from store.ids import lowest_id_at
from store.records import Arm, SpoolRecord
from store.versions import policy_name
from store.write.ingest import Ingester
from tests.support.records import call, reward
from trainer.recipes.recipe import PublishOptions

RULE = PublishOptions(mode="canary", margin=0.2)
GIVEN: Mapping[Arm, set[int]] = {"canary": {2}, "serving": {1}}
DELAY = timedelta(seconds=RULE.reward_delay_s)
VERSIONS: dict[Arm, int] = {"control": 0, "serving": 1, "canary": 2}
ARMS = tuple(VERSIONS)
MEANS: dict[Arm, float] = {"control": 0.4, "serving": 0.5, "canary": 0.6}
BEGAN = datetime.now(UTC) - timedelta(hours=2)


class Arrival(NamedTuple):
    """Pair a record with when it comes to the database."""

    at: datetime
    record: SpoolRecord


def begun(key: str, arm: Arm, at: datetime, number: int, served: int | None = None) -> Arrival:
    """Make the call of an episode of one call."""
    one = VERSIONS[arm] if served is None else served
    made = call(
        key,
        id=UUID(int=lowest_id_at(at).int + number),
        started_at=at,
        arm=arm,
        policy_version=one,
        served_model=policy_name("m", one, "m"),
    )
    return Arrival(at + timedelta(seconds=1), made)


def said(key: str, value: float, at: datetime) -> Arrival:
    return Arrival(at, msgspec.structs.replace(reward(value, episode=key), at=at))


def trial() -> Evidence:
    """Return what a controller that begins now knows of a canary beside what serves."""
    return Evidence("m", RULE, "canary", BEGAN - PROXIES_KNOW_AFTER, Comparison(RULE))


def traffic(random: Random, count: int) -> Iterator[Arrival]:
    """Make episodes whose rewards come in time or late, and are corrected, or never come."""
    for number in range(count):
        at = BEGAN + timedelta(seconds=random.uniform(0, 1500))
        arm = random.choice(ARMS)
        key = f"{arm}-{number}"
        yield begun(key, arm, at, number)
        for _ in range(random.choice([0, 1, 1, 1, 2])):
            value = float(random.random() < MEANS[arm])
            yield said(key, value, at + random.uniform(0.01, 1.6) * DELAY)


async def figures(engine: AsyncEngine, read: Evidence, now: datetime) -> Figures:
    """Read to the end, and return what that comes to."""
    async with engine.connect() as connection:
        assert await read.catch_up(connection, GIVEN, now)
    return read.comparison.figures()


@pytest.mark.parametrize("seed", range(5))
async def test_restarted_controller_finds_the_same_evidence(
    engine: AsyncEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parts of one episode take long on a busy machine.
    monkeypatch.setattr(evidence, "READ_S", 600.0)
    random = Random(seed)
    arrivals = sorted(traffic(random, 200), key=lambda one: one.at)
    looks = sorted(BEGAN + timedelta(seconds=random.uniform(0, 3200)) for _ in range(12))
    ran_on = restarted = trial()
    ingester = Ingester()
    for now in looks:
        come = [one.record for one in arrivals if one.at <= now]
        arrivals = [one for one in arrivals if one.at > now]
        random.shuffle(come)
        await ingester.store(engine, come)
        monkeypatch.setattr(evidence, "MAX_EPISODES", random.choice([1, 7, 50, 100_000]))
        if random.random() < 0.4:
            restarted = trial()
        found = await figures(engine, ran_on, now)
        assert found == await figures(engine, restarted, now)
    # All that came later than the last look changes nothing of what had counted by then.
    await ingester.store(engine, [one.record for one in arrivals])
    assert await figures(engine, trial(), now) == found
    assert found.new.episodes + found.old.episodes > 50
    assert found.new.unscored + found.old.unscored > 10


async def test_evidence_leaves_out_episodes_of_an_arm_that_another_version_served(
    engine: AsyncEngine,
) -> None:
    """A proxy takes what serves now for the canary a while longer; the one before was one too."""
    given: list[tuple[Arm, int]] = [("canary", 2), ("canary", 1), ("serving", 1), ("serving", 0)]
    arrivals = [
        begun(f"e-{n}", arm, BEGAN + timedelta(seconds=n), n, served)
        for n, (arm, served) in enumerate(given)
    ]
    await Ingester().store(engine, [one.record for one in arrivals])
    found = await figures(engine, trial(), BEGAN + 2 * DELAY)
    assert (found.new.episodes, found.old.episodes) == (1, 1)


async def test_evidence_leaves_out_episodes_begun_before_all_proxies_knew_of_the_trial(
    engine: AsyncEngine,
) -> None:
    at = [BEGAN + timedelta(seconds=seconds) for seconds in (-1, 1)]
    arrivals = [begun(f"e-{n}", "canary", one, n) for n, one in enumerate(at)]
    await Ingester().store(engine, [one.record for one in arrivals])
    found = await figures(engine, trial(), BEGAN + 2 * DELAY)
    assert found.new.episodes == 1
