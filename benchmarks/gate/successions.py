"""Let simulated versions serve one after the other, untried, and fall, under a watch."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from benchmarks.gate.falls import BASE_MEAN, SWING, SWINGS
from benchmarks.gate.runs import Tell, seeded
from benchmarks.gate.worlds import Random
from pawl.steward.gate.records import BASE, SERVING, Episode, GateOptions
from pawl.steward.gate.watch import Succession, Watched
from store.records import Record

# Each version is better than the one before by so much, up to this far above the base.
BETTER: Final = 0.01
MOST_ABOVE: Final = 0.2


class UntriedWorld(NamedTuple):
    """Describe versions that follow each other: the base's share, their fall, and their episodes.

    Each serves for `each` episodes of all arms.
    """

    base_share: float
    fall: float
    each: int = 128


class Untried(Record, frozen=True, kw_only=True):
    """Count the runs in which versions that follow each other were rolled back.

    Attributes:
        each: the episodes of a version, of all arms.
        versions: how many served in each run, and had not fallen.
        early: the runs in which some were while none had fallen.
        found: of the others, after how many episodes from the fall.
        lost: for each of `found`, how many versions from before the fall were rolled back as well.
        short: how often what serves again is from after the fall.
    """

    base_share: float
    fall: float
    each: int
    versions: int
    runs: int
    early: int
    found: list[int]
    lost: list[int]
    short: int


def run_untried(world: UntriedWorld, runs: int, episodes: int, tell: Tell) -> Untried:
    """Watch versions for so many episodes; those with a fall fall after half of them."""
    options = GateOptions(base_share=world.base_share)
    versions = episodes // world.each
    falls_with = versions // 2 + 1 if world.fall else versions + 1
    fallen_from = (falls_with - 1) * world.each
    early, short = 0, 0
    found: list[int] = []
    lost: list[int] = []
    for number in range(runs):
        random = seeded("untried", world, number)
        succession = Succession(options, after_base=True)
        end = _until_found(succession, _served(world, versions, falls_with, random), versions)
        if end is not None:
            seen, since = end[0], end[1].since or 0
            early += seen < fallen_from
            found += [seen - fallen_from] if seen >= fallen_from else []
            lost += [max(falls_with - since, 0)] if seen >= fallen_from else []
            short += seen >= fallen_from and since > falls_with
        tell(1)
    return Untried(
        base_share=world.base_share,
        fall=world.fall,
        each=world.each,
        versions=falls_with - 1,
        runs=runs,
        early=early,
        found=found,
        lost=lost,
        short=short,
    )


def _until_found(
    succession: Succession, episodes: Iterator[Episode], versions: int
) -> tuple[int, Watched] | None:
    """Return after how many episodes something is to be rolled back, and what; None: nothing is."""
    for version in range(1, versions + 1):
        succession.follow(version)
    for seen, episode in enumerate(episodes):
        succession.extend([episode])
        if succession.has_fallen:
            return seen, succession.watched()
    return None


def _served(
    world: UntriedWorld, versions: int, falls_with: int, random: Random
) -> Iterator[Episode]:
    count = versions * world.each
    for number in range(count):
        version = 1 + number // world.each
        phase = (number * SWINGS / count) % 1
        mean = BASE_MEAN + SWING * (2 * abs(2 * phase - 1) - 1)
        above = min(BETTER * version, MOST_ABOVE)
        above -= world.fall if version >= falls_with else 0.0
        if random.random() < world.base_share:
            yield Episode(BASE, "one", float(random.random() < mean))
        else:
            reward = float(random.random() < mean + above)
            yield Episode(SERVING, "one", reward, version=version)
