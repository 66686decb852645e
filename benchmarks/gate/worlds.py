"""Make up episodes: how rewards are spread, what families of tasks there are, how it all drifts."""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pawl.steward.gate.records import CANARY, SERVING, Episode

Floats = NDArray[np.float64]
Random = np.random.Generator
# The rewards' means in these families, of episodes at these places (0 to 1) in the run.
Mean = Callable[[Floats, Floats], Floats]
# Rewards with these means.
Spread = Callable[[Random, Floats], Floats]


class World(NamedTuple):
    """Say how episodes are scored by what serves; a canary's mean is another by an effect."""

    name: str
    mean: Mean
    spread: Spread
    families: int = 1
    canary_share: float = 0.1


class Drawn(NamedTuple):
    """Hold the episodes of many runs, one run a row: arm, family and reward of each."""

    canary: NDArray[np.bool_]
    family: NDArray[np.int64]
    reward: Floats

    def part(self, start: int, end: int) -> "Drawn":
        """Return the episodes from one place to another, of all runs."""
        of = np.s_[:, start:end]
        return Drawn(self.canary[of], self.family[of], self.reward[of])

    def episodes(self, run: int) -> list[Episode]:
        """Return the episodes of one run as the gate is told of them."""
        rows = zip(self.canary[run], self.family[run], self.reward[run], strict=True)
        return [
            Episode(CANARY if canary else SERVING, str(family), float(reward))
            for canary, family, reward in rows
        ]


def _right_or_wrong(random: Random, mean: Floats) -> Floats:
    return (random.random(mean.shape) < mean).astype(float)


def _even(random: Random, mean: Floats) -> Floats:
    return mean + random.uniform(-0.25, 0.25, mean.shape)


def _heavy_ends(random: Random, mean: Floats) -> Floats:
    """Return 0 or 1 in nine of ten episodes, and something between in the tenth."""
    between = random.random(mean.shape) < 0.1
    return np.where(
        between, mean + random.uniform(-0.2, 0.2, mean.shape), _right_or_wrong(random, mean)
    )


def _always(mean: float) -> Mean:
    return lambda family, _place: np.full(family.shape, mean)


EVEN_ODDS: Final = World("right or wrong, 0.5", _always(0.5), _right_or_wrong)
WORLDS: Final = (
    World("right or wrong, 0.05", _always(0.05), _right_or_wrong),
    World("right or wrong, 0.3", _always(0.3), _right_or_wrong),
    EVEN_ODDS,
    World("right or wrong, 0.95", _always(0.95), _right_or_wrong),
    World("even from 0.25 to 0.75", _always(0.5), _even),
    World("heavy at both ends", _always(0.4), _heavy_ends),
    World("8 families, 0.1 to 0.9", lambda family, _: 0.1 + 0.8 * family / 7, _right_or_wrong, 8),
    World("drift, 0.2 to 0.8", lambda _, place: 0.2 + 0.6 * place, _right_or_wrong),
    World("half of it canary", _always(0.5), _right_or_wrong, canary_share=0.5),
)


def draw_runs(world: World, effect: float, runs: int, count: int, random: Random) -> Drawn:
    """Draw runs of `count` episodes, with arms drawn as the hash draws them."""
    canary = random.random((runs, count)) < world.canary_share
    family = random.integers(0, world.families, (runs, count))
    place = np.broadcast_to(np.arange(count) / count, family.shape)
    mean = world.mean(family.astype(float), place) + effect * canary
    return Drawn(canary, family, world.spread(random, mean))
