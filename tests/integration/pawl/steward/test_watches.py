"""A watch over what serves rests on what counts by now, whoever begins to look, and when."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.steward import watching
from pawl.steward.evidence import KNOWN, STORED, PromotedOn
from pawl.steward.gate.trial import CELLS, Reference
from pawl.steward.watching import OnSuccession, OnWatch
from store.read import standing
from store.read.arms import begin_of_newest
from store.read.standing import Gated, Promotion, Standing, Term
from store.records import Arm
from store.write.ingest import Ingester
from tests.support.ledger.lineage import promote, trained
from tests.support.steward.arrivals import BEGAN, DELAY, RULE, Arrival, begun, said, version
from trainer.recipes.recipe import GateOptions

NOTHING = Reference([0.0] * CELLS)


async def fallen(engine: AsyncEngine, promoted: datetime, serves: datetime) -> None:
    """A version that was far above the base in what its trial was not told of, and is below now."""
    arrivals = []
    for number in range(300):
        arm: Arm = ("base", "canary")[number % 2]  # type: ignore[assignment]
        at = promoted - timedelta(seconds=400 - number)
        arrivals += [begun(f"t-{number}", arm, at, number)]
        arrivals += [said(f"t-{number}", float(arm == "canary"), at + DELAY / 2)]
        now: Arm = ("base", "serving")[number % 2]  # type: ignore[assignment]
        at = serves + KNOWN + timedelta(seconds=1 + number)
        served = 2 if now == "serving" else 0
        arrivals += [begun(f"s-{number}", now, at, number, served)]
        arrivals += [said(f"s-{number}", 0.5, at + DELAY / 2)]
    await Ingester().store(engine, [one.record for one in arrivals])


@pytest.mark.parametrize("since", [timedelta(0), timedelta(minutes=20)])
@pytest.mark.parametrize("is_told", [True, False])
async def test_what_began_before_a_promotion_and_counts_after_it_is_what_it_was_promoted_for(
    engine: AsyncEngine, is_told: bool, since: timedelta
) -> None:
    """As it serves for its trial, and as it serves again, after another was rolled back."""
    promoted = BEGAN + timedelta(hours=1)
    serves = promoted + since
    await fallen(engine, promoted, serves)
    until = promoted - DELAY if is_told else None
    told = msgspec.to_builtins(PromotedOn(NOTHING, until))
    evidence = Promotion(actor="steward", evidence=told, tried_at=promoted)
    serving = Standing(version=version(2, "serving"), gate=RULE, since=serves)
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
async def test_a_steward_that_saw_version_after_version_and_one_that_reads_all_come_to_the_same(
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


async def test_what_a_long_reward_delay_keeps_back_does_not_count_as_known(
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


async def test_the_terms_are_those_that_matter_for_the_newest_episodes_that_count(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "FAR", 2)
    async with engine.begin() as connection:
        await trained(connection, *range(6))
    for number in range(1, 7):
        async with engine.begin() as connection:
            await promote(connection, "m", number, reason="as made", actor="trainer")
    async with engine.connect() as connection:
        found = await standing.terms(connection, "m", 6, datetime.now(UTC))
        assert [one.version for one in found] == [5, 6]
        counted = (await standing.terms(connection, "m", 3, found[0].since))[-1].since
        assert [one.version for one in await standing.terms(connection, "m", 6, counted)] == [
            *(2, 3, 4, 5, 6)
        ]
        long_ago = counted - timedelta(days=1)
        assert [one.version for one in await standing.terms(connection, "m", 6, long_ago)] == [
            *range(7)
        ]


def test_a_succession_does_not_go_on_past_a_roll_back_or_another_rule() -> None:
    stands, terms = succession(1, 2)
    looks = OnSuccession(stands, terms)
    assert looks.goes_on(*succession(1, 2, 3))
    assert not looks.goes_on(*succession(1, 2))
    assert not OnSuccession(stands, terms).goes_on(*succession(1, 3))
    other = UNTRIED.model_copy(update={"margin": 0.1})
    assert not OnSuccession(stands, terms).goes_on(*succession(1, 2, 3, rule=other))


async def test_what_served_before_is_known_by_the_newest_episodes(engine: AsyncEngine) -> None:
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
