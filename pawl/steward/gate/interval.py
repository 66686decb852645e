"""Bound a difference at all times: what of all that it may be is not refuted."""

from collections.abc import Sequence
from math import log
from typing import Final

from pawl.steward.gate.blocks import Block
from pawl.steward.gate.wealth import ABOVE, BELOW, Side, log_wealth

# Bounds are multiples of 1/STEPS, rounded outwards.
STEPS: Final = 500


def lower_bound(blocks: Sequence[Block], mistakes: float) -> float:
    """Return the greatest value, of −1 to 1, that the difference is shown to be above.

    With probability 1 − `mistakes` the bound is at no time above the difference.
    """
    return -_bound(blocks, mistakes, ABOVE)


def upper_bound(blocks: Sequence[Block], mistakes: float) -> float:
    """Return the least value, of −1 to 1, that the difference is shown to be below."""
    return _bound(blocks, mistakes, BELOW)


def _bound(blocks: Sequence[Block], mistakes: float, side: Side) -> float:
    """Return the bound, with its sign turned if `side` is ABOVE.

    Wealth falls with its null on one side and rises on the other, so that bisection finds it.
    """
    needed = log(1 / mistakes)
    refuted, open_ = STEPS, -STEPS
    while refuted - open_ > 1:
        middle = (refuted + open_) // 2
        if log_wealth(blocks, -side * middle / STEPS, side) >= needed:
            refuted = middle
        else:
            open_ = middle
    return refuted / STEPS
