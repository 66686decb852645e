"""Means that do not depend on an order, and leave equal values what they are (pure)."""

from collections.abc import Sequence
from math import fsum


def mean_of(values: Sequence[float]) -> float:
    """The mean of one or more values; of equal ones exactly that value."""
    first = values[0]
    if all(value == first for value in values):
        return first
    return fsum(values) / len(values)


def mean_square(values: Sequence[float]) -> float:
    """The mean of the squares of one or more values."""
    return mean_of([value * value for value in values])
