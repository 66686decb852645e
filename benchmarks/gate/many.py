"""Send many runs through the gate at once: the trial's arithmetic over arrays.

`pawl.steward.gate.trial` takes ten microseconds an episode, and a thousand runs of thousands of
episodes in many worlds an hour. This computes the same for all runs together; `compare` sends some
of the runs through the product as well, one episode after the other, and compares the verdicts.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.gate.worlds import Bools, Drawn, Flags, Floats
from pawl.steward.gate.betting import ABOVE, BELOW, MOST_BET, PRIOR, STAKES, Side, block_size
from pawl.steward.gate.records import GateOptions
from pawl.steward.gate.trial import MARGIN, Slowness, Trial, all_guards

STAKE: Final = np.array(STAKES)
PROMOTED, RETIRED = 1, -1


class Verdicts(NamedTuple):
    """Hold each run's verdict (0: none), and after how many episodes it came."""

    kind: NDArray[np.int64]
    seen: NDArray[np.int64]


class Differ(Exception):
    """Report that the product came to another verdict than the arrays."""


class _Centres:
    """Keep the families' means of all runs, as `Centres` does of one."""

    def __init__(self, runs: int, families: int) -> None:
        self._totals, self._counts = np.zeros((runs, families)), np.zeros((runs, families))

    def of(self, family: NDArray[np.int64]) -> Floats:
        overall = (0.5 + self._totals.sum(1)) / (1 + self._counts.sum(1))
        means = (self._totals + PRIOR * overall[:, None]) / (self._counts + PRIOR)
        return np.take_along_axis(means, family, 1)

    def add(self, family: NDArray[np.int64], reward: Floats) -> None:
        rows = np.broadcast_to(np.arange(len(family))[:, None], family.shape)
        np.add.at(self._totals, (rows, family), reward)
        np.add.at(self._counts, (rows, family), 1)


class _Bets(NamedTuple):
    """Hold the wealth against some claims after each episode of each run.

    `settled` says where bets were settled: there the trial looks for a verdict.
    """

    wealth: list[Floats]
    settled: Bools


def verdicts(drawn: Drawn, options: GateOptions) -> Verdicts:
    """Return where each run ends: the first block after which the trial has a verdict."""
    size = block_size(options.canary_share, 1 - options.canary_share - options.base_share)
    scored = np.full(drawn.canary.shape, True)
    if "unscored" in drawn.ways:
        scored = ~drawn.ways["unscored"].wrong
    claims: list[tuple[float, Side]] = [(-options.scaled_margin, ABOVE), (0.0, BELOW)]
    rewards = _bets(drawn, drawn.reward, scored, size, claims)
    better, worse = rewards.wealth
    of_canary, of_others = ((scored & arm).cumsum(1) for arm in (drawn.canary, ~drawn.canary))
    promoted = (better >= 1 / options.mistakes) & (
        np.minimum(of_canary, of_others) >= options.fewest
    )
    retired = worse >= 2 / options.mistakes
    settled, needed = rewards.settled, 2 * len(all_guards(size)) / options.mistakes
    for flags in _guarded(drawn, size):
        guard = _bets(drawn, flags.wrong.astype(float), flags.told, size, [(MARGIN, ABOVE)])
        promoted &= guard.wealth[0] <= 1
        retired |= guard.wealth[0] >= needed
        settled = settled | guard.settled
    return _first(np.where(retired, RETIRED, np.where(promoted, PROMOTED, 0)) * settled)


def _first(found: NDArray[np.int64]) -> Verdicts:
    """Return the first verdict of each run."""
    at = (found != 0).argmax(1)
    kind = np.take_along_axis(found, at[:, None], 1)[:, 0]
    return Verdicts(kind, np.where(kind == 0, found.shape[1], at + 1))


def _guarded(drawn: Drawn, size: int) -> Iterator[Flags]:
    """Return what guards are told, of each that is told anything.

    Where nothing ever fails and all is scored, these guards only lose: they are left out.
    """
    for way, flags in drawn.ways.items():
        yield _slow(drawn, size) if way == "slow" else flags


def _slow(drawn: Drawn, size: int) -> Flags:
    """Return which episodes the product takes for slow: it needs their times in their order."""
    found = []
    for run in range(len(drawn.canary)):
        slowness = Slowness(size)
        found.append([slowness.is_slow(episode) for episode in drawn.episodes(run)])
    told = [[one is not None for one in run] for run in found]
    return Flags(np.array([[one is True for one in run] for run in found]), np.array(told))


def _bets(
    drawn: Drawn, values: Floats, told: Bools, size: int, claims: Sequence[tuple[float, Side]]
) -> _Bets:
    """Bet against claims (null and side) about the values of the episodes that have one."""
    runs, count = drawn.canary.shape
    # The episodes that have a value come first, in their order.
    order = np.argsort(~told, axis=1, kind="stable")
    canary = np.take_along_axis(drawn.canary, order, 1)
    family = np.take_along_axis(drawn.family, order, 1)
    value = np.take_along_axis(values, order, 1)
    have, every = told.sum(1), np.arange(runs)
    centres = _Centres(runs, int(drawn.family.max()) + 1)
    parts = [np.ones((runs, len(STAKES))) for _ in claims]
    steps = [[np.ones(runs)] for _ in claims]
    ended, settled = np.zeros((runs, count), int), np.full((runs, count), False)
    for end in range(size, int(have.max(initial=0)) + 1, size):
        of = np.s_[:, end - size : end]
        part = Drawn(canary[of], family[of], value[of])
        difference, weight, reach = _blocks(part, centres.of(part.family))
        is_whole = have >= end
        weight = np.where(is_whole, weight, 0.0)
        centres.add(part.family, part.reward)
        for (null, side), own, step in zip(claims, parts, steps, strict=True):
            _settle(own, side * (difference - null), weight, reach + side * null)
            step.append(own.mean(1))
        last = every[is_whole], order[is_whole, end - 1]
        ended[last], settled[last] = 1, weight[is_whole] > 0
    blocks = ended.cumsum(1)
    return _Bets([np.take_along_axis(np.array(one).T, blocks, 1) for one in steps], settled)


def _blocks(part: Drawn, centre: Floats) -> tuple[Floats, Floats, Floats]:
    """Return difference, weight and reach of one block of each run; weight 0 says nothing."""
    size = part.canary.shape[1]
    count = part.canary.sum(1)
    left = part.reward - centre
    own = (left * part.canary).sum(1) / np.maximum(count, 1)
    rest = (left * ~part.canary).sum(1) / np.maximum(size - count, 1)
    return own - rest, count * (size - count) / size, 1 + centre.max(1) - centre.min(1)


def _settle(parts: Floats, won: Floats, weight: Floats, room: Floats) -> None:
    """Settle bets that win `won` of what they could lose (`room`), in place."""
    bets = np.minimum(STAKE * weight[:, None], MOST_BET)
    parts *= 1 + bets * (won / room)[:, None]
    # A float that runs out at the top would stay there; those runs have ended long before.
    np.minimum(parts, 1e200, out=parts)


def compare(drawn: Drawn, found: Verdicts, options: GateOptions, runs: int) -> None:
    """Send the first runs through the product, one episode after the other.

    Raises:
        Differ: it decides otherwise, or at another episode.
    """
    names = {"promote": PROMOTED, "retire": RETIRED, "wait": 0}
    for run in range(runs):
        trial, seen = Trial(options), 0
        for episode in drawn.episodes(run):
            trial.extend([episode])
            seen += 1
            if trial.is_decided:
                break
        kind = names[trial.decide(0.0).kind]
        if (kind, seen) != (found.kind[run], found.seen[run]):
            raise Differ(
                f"run {run}: {kind} after {seen} episodes in the product,"
                f" {found.kind[run]} after {found.seen[run]} in the arrays"
            )
