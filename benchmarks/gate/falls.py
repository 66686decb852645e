"""Let simulated versions serve, and fall, under the product's watch."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from benchmarks.gate.runs import Tell, seeded
from benchmarks.gate.worlds import Random
from pawl.steward.gate.records import BASE, CANARY, SERVING, Arm, Episode, GateOptions
from pawl.steward.gate.trial import Lead, Reference, joined
from pawl.steward.gate.watch import Watch
from store.records import Record

# Rewards are right or wrong: the base's mean, and how far what is watched is above it at first.
BASE_MEAN: Final = 0.5
ABOVE_BASE: Final = 0.2
# What the world does to both: their means swing by this much, this often in a run.
SWING: Final = 0.15
SWINGS: Final = 3


class FallWorld(NamedTuple):
    """Describe versions that serve: the base's share, their fall, and what they were promoted on.

    That is `tried` episodes of all arms up to the verdict, and `later` that counted after it.
    """

    base_share: float
    fall: float
    tried: int = 3_000
    later: int = 0


class Falls(Record, frozen=True, kw_only=True):
    """Count the serving versions that were rolled back.

    Attributes:
        tried: the episodes that a version's trial took to its verdict.
        later: those that had begun by its promotion, and counted after the verdict.
        early: how many were while they had not fallen.
        found: of the others, after how many episodes from the fall.
    """

    base_share: float
    fall: float
    runs: int
    early: int
    found: list[int]
    tried: int
    later: int


def run_falls(world: FallWorld, runs: int, served: int, tell: Tell) -> Falls:
    """Watch versions for `served` episodes; those with a fall fall after a quarter of them."""
    base_share, fall = world.base_share, world.fall
    options = GateOptions(base_share=base_share)
    early, found = 0, []
    for number in range(runs):
        random = seeded("falls", base_share, fall, number)
        watch = Watch(_promoted(options, world, random), options)
        fallen_from = served // 4 if fall else served
        for seen, episode in enumerate(_serving(options, fall, fallen_from, served, random)):
            watch.extend([episode])
            if watch.has_fallen:
                early += seen < fallen_from
                found += [seen - fallen_from] if seen >= fallen_from else []
                break
        tell(1)
    return Falls(
        base_share=base_share,
        fall=fall,
        runs=runs,
        early=early,
        found=found,
        tried=world.tried,
        later=world.later,
    )


def _promoted(options: GateOptions, world: FallWorld, random: Random) -> Reference:
    """Return the reference of a version that was tried as a canary."""
    then = _lead(options, world.tried, random)
    return joined(then, _lead(options, world.later, random)) if world.later else then


def _lead(options: GateOptions, count: int, random: Random) -> Reference:
    lead = Lead(options)
    for _ in range(count):
        drawn = random.random()
        if drawn < options.base_share:
            lead.extend([_episode(BASE, BASE_MEAN, random)])
        elif drawn < options.base_share + options.canary_share:
            lead.extend([_episode(CANARY, BASE_MEAN + ABOVE_BASE, random)])
    return lead.reference()


def _serving(
    options: GateOptions, fall: float, fallen_from: int, served: int, random: Random
) -> Iterator[Episode]:
    for number in range(served):
        phase = (number * SWINGS / served) % 1
        mean = BASE_MEAN + SWING * (2 * abs(2 * phase - 1) - 1)
        if random.random() < options.base_share:
            yield _episode(BASE, mean, random)
        else:
            above = ABOVE_BASE - (fall if number >= fallen_from else 0.0)
            yield _episode(SERVING, mean + above, random)


def _episode(arm: Arm, mean: float, random: Random) -> Episode:
    return Episode(arm, "one", float(random.random() < mean))
