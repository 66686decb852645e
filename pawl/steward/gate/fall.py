"""Bet against the claim that a lead over the base model has not fallen by more than the margin.

For each difference d that the lead may have been, the claim says that it now is d − margin or more;
the wealth against "at most d then" times that against "d − margin or more now" has a mean of at
most 1 if d is the true one. So the least of these products over all d refutes the claim at 1/α.
"""

from math import exp, log

from pawl.steward.gate.blocks import Block
from pawl.steward.gate.reference import CELLS, Reference, cell_start
from pawl.steward.gate.wealth import BELOW, MOST_WEALTH, LateWealth


class FallWealth:
    """Keep the wealth against one such claim; a part of the bets begins with every block."""

    def __init__(self, then: Reference, margin: float) -> None:
        """Begin with what is known of the lead `then`; the margin is a share of the range."""
        self._then = then.logs
        self._now = [LateWealth(cell_start(cell) - margin, BELOW) for cell in range(CELLS)]

    @property
    def value(self) -> float:
        """Return the least product over all differences, at most MOST_WEALTH."""
        pairs = zip(self._then, self._now, strict=True)
        least = min(then + log(now.value) for then, now in pairs)
        return exp(min(least, log(MOST_WEALTH)))

    def update(self, block: Block) -> None:
        """Settle the bets on one block of the time since."""
        for wealth in self._now:
            wealth.update(block)
