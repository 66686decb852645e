"""What a trial or a watch rests on: the same whoever reads it and when, and none left out."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.controller import watching
from pawl.controller.evidence import KNOWN, STORED, OnTrial, PromotedOn
from pawl.controller.gate.trial import CELLS, Reference
from pawl.controller.watching import OnSuccession, OnWatch
from store.ids import lowest_id_at
from store.read import gates
from store.read.gates import (
    ArmPart,
    Gated,
    Promotion,
    Standing,
    Term,
    arm_episodes,
    begin_of_newest,
)
from store.records import ARMS, Arm, SpoolRecord
from store.versions import policy_name
from store.write.ingest import Ingester
from tests.support.controller.trials import RULE
from tests.support.ledger.lineage import promote, trained
from tests.support.proxy.versions import version
from tests.support.records import call, reward
from trainer.recipes.recipe import GateOptions

DELAY = timedelta(seconds=RULE.reward_delay_s)
GATE = RULE.model_dump(mode="json")
VERSIONS: dict[Arm, int] = {"base": 0, "serving": 1, "canary": 2}
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


MEANS: dict[Arm, float] = {"base": 0.4, "serving": 0.5, "canary": 0.6}


def trial() -> OnTrial:
    """A controller's that begins now."""
    since = BEGAN - KNOWN
    serving = Standing(version=version(1, "serving"), gate=GATE, since=since)
    canary = Standing(version=version(2, "canary"), gate=GATE, since=since)
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
async def test_controller_that_ran_on_and_one_that_was_restarted_come_to_the_same(
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
        monkeypatch.setattr("pawl.controller.evidence.MOST", random.choice([1, 7, 50, 100_000]))
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


async def test_part_too_long_for_a_look_is_read_in_shorter_ones(
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

    monkeypatch.setattr("pawl.controller.evidence.arm_episodes", slow)
    monkeypatch.setattr("pawl.controller.evidence.MOST", 20)
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


async def test_trial_that_takes_long_to_read_is_read_to_its_end(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: Any, **__: Any) -> ArmPart:
        raise TimeoutError

    looks, end = trial(), BEGAN + 2 * DELAY
    with monkeypatch.context() as patched:
        patched.setattr("pawl.controller.evidence.arm_episodes", slow)
        with pytest.raises(TimeoutError):
            await figures(engine, looks, end)
    assert not looks.is_old(end + timedelta(days=1))
    await figures(engine, looks, end)
    assert not looks.is_old(end - timedelta(seconds=1))
    assert looks.is_old(end)


NOTHING = Reference([0.0] * CELLS)


async def fallen(engine: AsyncEngine, promoted: datetime, serves: datetime) -> None:
    """A version that was far above the base in what its trial was not told of, and is below now."""
    arrivals = []
    for number in range(300):
        arm: Arm = ("base", "canary")[number % 2]
        at = promoted - timedelta(seconds=400 - number)
        arrivals += [begun(f"t-{number}", arm, at, number)]
        arrivals += [said(f"t-{number}", float(arm == "canary"), at + DELAY / 2)]
        now: Arm = ("base", "serving")[number % 2]
        at = serves + KNOWN + timedelta(seconds=1 + number)
        served = 2 if now == "serving" else 0
        arrivals += [begun(f"s-{number}", now, at, number, served)]
        arrivals += [said(f"s-{number}", 0.5, at + DELAY / 2)]
    await Ingester().store(engine, [one.record for one in arrivals])


@pytest.mark.parametrize("since", [timedelta(0), timedelta(minutes=20)])
@pytest.mark.parametrize("is_told", [True, False])
async def test_episodes_begun_before_a_promotion_and_counted_later_are_what_it_was_promoted_for(
    engine: AsyncEngine, is_told: bool, since: timedelta
) -> None:
    """As it serves for its trial, and as it serves again, after another was rolled back."""
    promoted = BEGAN + timedelta(hours=1)
    serves = promoted + since
    await fallen(engine, promoted, serves)
    until = promoted - DELAY if is_told else None
    told = msgspec.to_builtins(PromotedOn(NOTHING, until))
    evidence = Promotion(actor="controller", evidence=told, tried_at=promoted)
    serving = Standing(version=version(2, "serving"), gate=GATE, since=serves)
    later = serves + DELAY + STORED
    async with engine.connect() as connection:
        watch = OnWatch(Gated(now=later, frozen=False, serving=serving), evidence)
        # Before what it serves counts nothing can be said.
        for seconds in (-300, 0, 5):
            found = await watch.look(connection, later + timedelta(seconds=seconds))
            assert found is not None
            assert found.arms["serving"].episodes == 0
        end = later + timedelta(seconds=400)
        found = await watch.look(connection, end)
        assert found is not None
        assert found.roll_back is is_told
        # One that was started again comes to the same.
        again = OnWatch(Gated(now=end, frozen=False, serving=serving), evidence)
        assert await again.look(connection, end) == found


UNTRIED = GateOptions(base_share=0.3, margin=0.2, reward_delay_s=DELAY.total_seconds())
# Versions get the traffic so long after each other, in seconds.
APART_S = 150


def succession(*ago: int, rule: GateOptions = UNTRIED) -> tuple[Gated, list[Term]]:
    """Where a policy stands of which these versions have served by now, from the first on."""
    terms = [
        Term(
            version=number,
            since=BEGAN + timedelta(seconds=APART_S * (number - 1)),
            is_untried=number > 0,
        )
        for number in (0, *ago)
    ]
    dumped, last = rule.model_dump(mode="json"), terms[-1]
    serving = Standing(version=version(last.version, "serving"), gate=dumped, since=last.since)
    return Gated(now=BEGAN, frozen=False, serving=serving), terms


def untried(random: Random, falls_with: int) -> Iterator[Arrival]:
    """Episodes of four versions, each of its time, and of the base model."""
    for number in range(4 * APART_S):
        at = BEGAN + timedelta(seconds=number)
        served = 1 + number // APART_S
        arm: Arm = "base" if random.random() < UNTRIED.base_share else "serving"
        lead = 0.4 if served < falls_with else -0.35
        mean = 0.4 if arm == "base" else 0.4 + lead
        yield begun(f"u-{number}", arm, at, number, served if arm == "serving" else 0)
        yield said(f"u-{number}", float(random.random() < mean), at + DELAY / 2)


@pytest.mark.parametrize("falls_with", [3, 9])
async def test_controller_that_saw_version_after_version_and_one_that_reads_all_come_to_the_same(
    engine: AsyncEngine, falls_with: int
) -> None:
    arrivals = list(untried(Random(falls_with), falls_with))
    await Ingester().store(engine, [one.record for one in arrivals])
    ran_on: OnSuccession | None = None
    found = []
    async with engine.connect() as connection:
        for seconds in range(0, 1500, 250):
            now = BEGAN + timedelta(seconds=seconds)
            stands, terms = succession(*range(1, min(4, 1 + seconds // APART_S) + 1))
            if ran_on is None or not ran_on.goes_on(stands, terms):
                assert ran_on is None
                ran_on = OnSuccession(stands, terms)
            found.append(await ran_on.look(connection, now))
            assert found[-1] == await OnSuccession(stands, terms).look(connection, now)
    last = found[-1]
    assert last is not None
    assert last.roll_back is (falls_with == 3)
    # What is rolled back begins with what fell, or shortly before.
    assert falls_with == 9 or last.since in (2, 3)


async def test_episodes_kept_back_by_a_long_reward_delay_do_not_count_as_known(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many episodes as are read at most began since the last that count."""
    monkeypatch.setattr(watching, "EPISODES_BEFORE", APART_S)
    await Ingester().store(engine, [one.record for one in untried(Random(2), 2)])
    async with engine.connect() as connection:
        looks = OnSuccession(*succession(1, 2, 3, 4))
        now = BEGAN + timedelta(seconds=2 * APART_S) + DELAY + STORED
        found = await looks.look(connection, now)
    assert found is not None
    assert found.since == 2
    assert found.arms["serving"].episodes > APART_S / 2


async def test_terms_reach_back_as_far_as_the_newest_episodes_that_count(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "FAR", 2)
    async with engine.begin() as connection:
        await trained(connection, *range(6))
    for number in range(1, 7):
        async with engine.begin() as connection:
            await promote(connection, "m", number, reason="as made", actor="trainer")
    async with engine.connect() as connection:
        found = await gates.terms(connection, "m", 6, datetime.now(UTC))
        assert [one.version for one in found] == [5, 6]
        counted = (await gates.terms(connection, "m", 3, found[0].since))[-1].since
        assert [one.version for one in await gates.terms(connection, "m", 6, counted)] == [
            *(2, 3, 4, 5, 6)
        ]
        long_ago = counted - timedelta(days=1)
        assert [one.version for one in await gates.terms(connection, "m", 6, long_ago)] == [
            *range(7)
        ]


def test_succession_does_not_go_on_past_a_roll_back_or_another_rule() -> None:
    stands, terms = succession(1, 2)
    looks = OnSuccession(stands, terms)
    assert looks.goes_on(*succession(1, 2, 3))
    assert not looks.goes_on(*succession(1, 2))
    assert not OnSuccession(stands, terms).goes_on(*succession(1, 3))
    other = UNTRIED.model_copy(update={"margin": 0.1})
    assert not OnSuccession(stands, terms).goes_on(*succession(1, 2, 3, rule=other))


async def test_reading_begins_with_the_newest_episodes_of_what_served_before(
    engine: AsyncEngine,
) -> None:
    at = [BEGAN + timedelta(seconds=number) for number in range(9)]
    arrivals = [begun(f"n-{n}", "base", one, n) for n, one in enumerate(at)]
    await Ingester().store(engine, [one.record for one in arrivals])

    async def begin(most: int, since: datetime, until: datetime) -> datetime:
        async with engine.connect() as connection:
            return await begin_of_newest(connection, "m", since=since, until=until, most=most)

    def is_at(found: datetime, wanted: datetime) -> bool:
        return abs(found - wanted) < timedelta(milliseconds=10)

    assert is_at(await begin(3, BEGAN, at[6]), at[3])
    assert is_at(await begin(100, BEGAN, at[6]), at[0])
    assert is_at(await begin(100, at[2], at[6]), at[2])
    assert await begin(100, at[6], at[6]) == at[6]
