"""Means that do not depend on the order of values and are exact for equal values (pure)."""

from collections.abc import Sequence
from math import fsum


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of one or more values; the mean of equal values is exactly that value."""
    first = values[0]
    if all(value == first for value in values):
        return first
    return fsum(values) / len(values)


def mean_square(values: Sequence[float]) -> float:
    """Return the mean of the squares of one or more values."""
    return mean_of([value * value for value in values])
