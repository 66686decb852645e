"""Let simulated canaries go through the gate, and look after every episode."""

from collections.abc import Callable
from statistics import NormalDist, median
from typing import Final
from zlib import crc32

import numpy as np

from benchmarks.gate.many import PROMOTED, RETIRED, compare, verdicts
from benchmarks.gate.worlds import Drawn, Floats, Random, World, draw_runs
from benchmarks.proxy.figures import percentile
from pawl.steward.gate.records import GateOptions
from store.records import Record

# How sure the fixed-horizon test is to find the effect that it was planned for.
POWER: Final = 0.8
# Runs that are computed together, and those of each world that the product goes through as well.
TOGETHER: Final = 100
COMPARED: Final = 2
Tell = Callable[[int], None]


class Ends(Record, frozen=True, kw_only=True):
    """Count how simulated canaries ended; `taken` is the episodes of those that were decided."""

    world: str
    effect: float
    runs: int
    promoted: int
    retired: int
    taken: list[int]
    fixed: float

    @property
    def middle(self) -> float:
        """Return the median episodes to a decision."""
        return median(self.taken) if self.taken else float("nan")

    @property
    def ninth(self) -> float:
        """Return the episodes after which nine of ten of those that were decided were."""
        return percentile(self.taken, 0.9)


def options_for(world: World) -> GateOptions:
    """Return the usual options, with the world's shares; no base, which is not compared."""
    return GateOptions(canary_share=world.canary_share, base_share=0.0)


def seeded(*parts: object) -> Random:
    """Return chance that is the same for the same words and numbers."""
    return np.random.default_rng(crc32(repr(parts).encode()))


def run_world(world: World, effect: float, runs: int, count: int, tell: Tell) -> Ends:
    """Run canaries of this effect to their verdicts, or to `count` episodes.

    Raises:
        Differ: the product decides otherwise than the arrays.
    """
    options = options_for(world)
    random = seeded(world.name, effect)
    kinds: list[int] = []
    taken: list[int] = []
    while len(kinds) < runs:
        now = min(TOGETHER, runs - len(kinds))
        drawn = draw_runs(world, effect, now, count, random)
        found = verdicts(drawn, options)
        if not kinds:
            compare(drawn, found, options, min(COMPARED, now))
        kinds += [int(kind) for kind in found.kind]
        taken += [int(seen) for kind, seen in zip(*found, strict=True) if kind]
        tell(now)
    return Ends(
        world=world.name,
        effect=effect,
        runs=runs,
        promoted=kinds.count(PROMOTED),
        retired=kinds.count(RETIRED),
        taken=taken,
        fixed=fixed_horizon(world, effect, options),
    )


def fixed_horizon(world: World, effect: float, options: GateOptions) -> float:
    """Return the episodes that a test with one look, planned for this effect, needs.

    The difference is that of two means of right-or-wrong rewards.
    """
    mean = float(world.mean(np.zeros(1), np.full(1, 0.5))[0])
    other = mean + effect
    share = world.canary_share
    variance = other * (1 - other) / share + mean * (1 - mean) / (1 - share)
    return horizon(variance, effect, options)


def horizon(variance: float, effect: float, options: GateOptions) -> float:
    """Return the episodes that a test with one look, planned for this effect, needs.

    Normal approximation, one-sided, at the gate's level: of "worse by the margin" if the effect is
    not below 0, else of "as good". `variance` is that of the difference of means, times episodes.
    """
    level = options.mistakes if effect >= 0 else options.mistakes / 2
    gap = effect + options.margin if effect >= 0 else -effect
    normal = NormalDist()
    return variance * ((normal.inv_cdf(1 - level) + normal.inv_cdf(POWER)) / gap) ** 2


def peeked(world: World, runs: int, count: int, options: GateOptions) -> float:
    """Return how often a z-test, looked at after every episode, calls an equal canary lower.

    At the level at which the gate retires, from the episode on at which each arm has `fewest`.
    """
    bound = NormalDist().inv_cdf(options.mistakes / 2)
    drawn = draw_runs(world, 0.0, runs, count, seeded(world.name, "peeked"))
    own, own_error, own_count = _running(drawn, drawn.canary)
    rest, rest_error, rest_count = _running(drawn, ~drawn.canary)
    enough = np.minimum(own_count, rest_count) >= options.fewest
    below = own - rest < bound * np.sqrt(own_error + rest_error)
    return float((below & enough).any(1).mean())


def _running(drawn: Drawn, arm: np.ndarray) -> tuple[Floats, Floats, Floats]:
    """Return an arm's mean, squared standard error and count after each episode."""
    count = np.maximum(arm.cumsum(1), 1)
    mean = (drawn.reward * arm).cumsum(1) / count
    squares = (drawn.reward**2 * arm).cumsum(1) / count
    return mean, (squares - mean**2) / count, count
