"""Keep how far a version was above the base model when it was promoted."""

from collections.abc import Sequence
from math import floor, log
from typing import Final

import msgspec

from pawl.steward.gate.blocks import Block
from pawl.steward.gate.wealth import ABOVE, MOST_WEALTH, log_wealth

# Differences of −1 to 1 are taken in cells of this width.
CELLS: Final = 100


class Reference(msgspec.Struct, frozen=True):
    """Hold the logarithm of the wealth against "at most this far above the base", by cell.

    Cell k is of differences from −1 + 2k/CELLS on; its entry is of its upper end, where the wealth
    is the least of the cell, rounded down. JSON as it is: part of a promotion's evidence.
    """

    logs: list[float]

    def __post_init__(self) -> None:
        """Check that there is an entry for each cell."""
        if len(self.logs) != CELLS:
            raise ValueError(f"a reference has {CELLS} entries, and this one {len(self.logs)}")


def reference_of(blocks: Sequence[Block]) -> Reference:
    """Return what blocks of canary and base say about their difference."""
    ends = [cell_start(cell + 1) for cell in range(CELLS)]
    return Reference([floor(100 * log_wealth(blocks, end, ABOVE)) / 100 for end in ends])


def lead_of_base() -> Reference:
    """Return what is known of how far the base model is above itself: neither more nor less."""
    surely = floor(log(MOST_WEALTH))
    return Reference([surely if cell_start(cell + 1) <= 0 else 0.0 for cell in range(CELLS)])


def joined(one: Reference, other: Reference) -> Reference:
    """Return what two sets of blocks say together that have no episode in common.

    The product of two fair games in turn, the second begun anew with 1, is a fair game.
    """
    return Reference([a + b for a, b in zip(one.logs, other.logs, strict=True)])


def cell_start(cell: int) -> float:
    """Return the lower end of a cell."""
    return -1 + 2 * cell / CELLS
