"""Measure how far comparable returns spread, and whether they differ at all (pure).

Each episode counts once, whatever its number of calls. An episode's value is the mean of its
calls' returns, and its part in the variance is their mean squared difference from the
baseline's mean. Where all its calls have the same return, as they have by default, both are
the usual mean and sample variance of the episodes' returns.
"""

from collections.abc import Sequence
from math import fsum, sqrt

from trainer.credit.baselines.baseline import NoSignal
from trainer.credit.means import mean_square


def spread_about(mean: float, returns: Sequence[Sequence[float]]) -> float:
    """Return the sample standard deviation over episodes (divisor n − 1), 0 for a single one.

    An episode's part is the mean squared difference of its calls' returns from `mean`.
    """
    if len(returns) < 2:
        return 0.0
    squares = [mean_square([value - mean for value in values]) for values in returns]
    return sqrt(fsum(squares) / (len(returns) - 1))


def no_signal_reason(mean: float, returns: Sequence[Sequence[float]]) -> NoSignal | None:
    """Return why a comparison within a group with this mean gives no signal, or None."""
    if len(returns) < 2:
        return "alone"
    return "no_spread" if are_all_equal(mean, returns) else None


def are_all_equal(mean: float, returns: Sequence[Sequence[float]]) -> bool:
    """Return True if every call's return is `mean`."""
    return all(value == mean for values in returns for value in values)
