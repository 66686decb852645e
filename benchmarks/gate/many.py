"""Send many runs through the gate at once: the trial's arithmetic over arrays.

`pawl.steward.gate.trial` takes ten microseconds an episode, and a thousand runs of thousands of
episodes in many worlds an hour. This computes the same for all runs together; `compare` sends some
of the runs through the product as well, one episode after the other, and compares the verdicts.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.gate.worlds import Drawn, Floats
from pawl.steward.gate.blocks import block_size
from pawl.steward.gate.centres import PRIOR
from pawl.steward.gate.records import GateOptions
from pawl.steward.gate.trial import Trial
from pawl.steward.gate.wealth import MOST_BET, STAKES

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


def verdicts(drawn: Drawn, options: GateOptions) -> Verdicts:
    """Return where each run ends: the first block after which the trial has a verdict."""
    runs, count = drawn.canary.shape
    size = block_size(options.canary_share, 1 - options.canary_share - options.base_share)
    centres = _Centres(runs, int(drawn.family.max()) + 1)
    better, worse = np.ones((runs, len(STAKES))), np.ones((runs, len(STAKES)))
    kind, seen = np.zeros(runs, int), np.full(runs, count)
    tested = np.zeros(runs)
    for end in range(size, count + 1, size):
        part = drawn.part(end - size, end)
        difference, weight, reach = _blocks(part, centres.of(part.family))
        centres.add(part.family, part.reward)
        _settle(better, difference, weight, reach - options.scaled_margin, options.scaled_margin)
        _settle(worse, -difference, weight, reach, 0.0)
        tested += part.canary.sum(1)
        enough = np.minimum(tested, end - tested) >= options.fewest
        found = np.where((better.mean(1) >= 1 / options.mistakes) & enough, PROMOTED, 0)
        found = np.where(worse.mean(1) >= 2 / options.mistakes, RETIRED, found)
        new = (kind == 0) & (found != 0)
        kind[new], seen[new] = found[new], end
    return Verdicts(kind, seen)


def _blocks(part: Drawn, centre: Floats) -> tuple[Floats, Floats, Floats]:
    """Return difference, weight and reach of one block of each run; weight 0 says nothing."""
    size = part.canary.shape[1]
    count = part.canary.sum(1)
    left = part.reward - centre
    own = (left * part.canary).sum(1) / np.maximum(count, 1)
    rest = (left * ~part.canary).sum(1) / np.maximum(size - count, 1)
    return own - rest, count * (size - count) / size, 1 + centre.max(1) - centre.min(1)


def _settle(parts: Floats, difference: Floats, weight: Floats, room: Floats, margin: float) -> None:
    """Settle bets that the difference is above −margin, in place."""
    odds = (difference + margin) / room
    bets = np.minimum(STAKE * weight[:, None], MOST_BET)
    parts *= 1 + bets * odds[:, None]
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
