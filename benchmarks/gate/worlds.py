"""Make up episodes: how rewards are spread, what families of tasks there are, how it all drifts.

And how often episodes go wrong in the ways that a gate guards.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pawl.steward.gate.records import CANARY, SERVING, Episode
from pawl.steward.gate.trial import MARGIN

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Random = np.random.Generator
# The rewards' means in these families, of episodes at these places (0 to 1) in the run.
Mean = Callable[[Floats, Floats], Floats]
# Rewards with these means.
Spread = Callable[[Random, Floats], Floats]


# What a gate guards, in the order in which it is drawn.
Way = Literal["failed", "unscored", "malformed", "tools_failed", "slow"]
TOOLS: Final[tuple[Way, ...]] = ("malformed", "tools_failed")
# The share of episodes that call tools, and what slow and other episodes take.
CALLING: Final = 0.5
SLOW_S, QUICK_S = 3.0, 1.0


class World(NamedTuple):
    """Say how episodes are scored by what serves; a canary's mean is another by an effect.

    `wrong` is the share of episodes that go wrong in each way that is guarded, None if nothing is
    told of that; a canary's do so `more` often. `hides` is the share of its rewards of 0 that
    nobody gives.
    """

    name: str
    mean: Mean
    spread: Spread
    families: int = 1
    canary_share: float = 0.1
    wrong: float | None = None
    more: float = 0.0
    hides: float = 0.0


class Flags(NamedTuple):
    """Say of episodes whether they went wrong in one way, and of which that is `told`."""

    wrong: Bools
    told: Bools


NOTHING_WRONG: Final[Mapping[Way, Flags]] = MappingProxyType({})


class Drawn(NamedTuple):
    """Hold the episodes of many runs, one run a row: arm, family and reward of each.

    `ways` has the ways to go wrong that anything is told of.
    """

    canary: Bools
    family: NDArray[np.int64]
    reward: Floats
    ways: Mapping[Way, Flags] = NOTHING_WRONG

    def episodes(self, run: int) -> list[Episode]:
        """Return the episodes of one run as the gate is told of them."""
        count = self.canary.shape[1]
        told = {way: _told(flags, run) for way, flags in self.ways.items()}
        none: list[bool | None] = [None] * count
        seconds = [None if one is None else _seconds(one) for one in told.get("slow", none)]
        rows = zip(
            self.canary[run],
            self.family[run],
            self.reward[run],
            *(told.get(way, none) for way in ("unscored", "failed", *TOOLS)),
            seconds,
            strict=True,
        )
        return [
            Episode(
                CANARY if canary else SERVING,
                str(family),
                None if unscored else float(reward),
                bool(failed),
                malformed,
                tools_failed,
                took,
            )
            for canary, family, reward, unscored, failed, malformed, tools_failed, took in rows
        ]


def _told(flags: Flags, run: int) -> list[bool | None]:
    pairs = zip(flags.wrong[run].tolist(), flags.told[run].tolist(), strict=True)
    return [wrong if told else None for wrong, told in pairs]


def _seconds(slow: bool) -> float:
    return SLOW_S if slow else QUICK_S


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
    World("0.5; 0.3 wrong in each way", _always(0.5), _right_or_wrong, wrong=0.3),
    World("0.5; 0.3, and 0.05 more", _always(0.5), _right_or_wrong, wrong=0.3, more=MARGIN),
)
# Of what these get wrong a part has no reward.
HIDING: Final = tuple(
    World(f"{hides:.0%} of its wrong ones", _always(0.5), _right_or_wrong, hides=hides)
    for hides in (0.3, 0.5, 0.8)
)


def draw_runs(world: World, effect: float, runs: int, count: int, random: Random) -> Drawn:
    """Draw runs of `count` episodes, with arms drawn as the hash draws them."""
    canary = random.random((runs, count)) < world.canary_share
    family = random.integers(0, world.families, (runs, count))
    place = np.broadcast_to(np.arange(count) / count, family.shape)
    mean = world.mean(family.astype(float), place) + effect * canary
    drawn = Drawn(canary, family, world.spread(random, mean))
    if world.hides:
        hidden = canary & (drawn.reward == 0) & (random.random(canary.shape) < world.hides)
        return drawn._replace(ways={"unscored": Flags(hidden, np.full(canary.shape, True))})
    if world.wrong is None:
        return drawn
    return drawn._replace(ways=_ways(random, (world.wrong + world.more * canary).astype(float)))


def _ways(random: Random, shares: Floats) -> dict[Way, Flags]:
    """Draw how episodes go wrong, each way with these probabilities.

    None fails and is unscored: it would count as the lowest reward, and change the effect.
    """
    every, calling = np.full(shares.shape, True), random.random(shares.shape) < CALLING
    drawn = random.random(shares.shape)
    ways: dict[Way, Flags] = {
        "failed": Flags(drawn < shares, every),
        "unscored": Flags(drawn >= 1 - shares, every),
        "slow": Flags(random.random(shares.shape) < shares, every),
    }
    for way in TOOLS:
        ways[way] = Flags(random.random(shares.shape) < shares, calling)
    return ways
