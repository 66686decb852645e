"""Test whether rewards have fallen below what they were, of whatever version they are (pure).

Without a control it is not known whether the version is at fault, or tasks became harder: a fall
stops nothing but training. In return it is seen after half as many episodes.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean
from typing import Final

# So many of the newest episodes are compared with those before them, at most PAST.
WINDOWS: Final = (64, 112)
PAST: Final = 400
FEWEST_BEFORE: Final = 64
# Every so many episodes.
STEP: Final = 16
# A fall that counts: as a share of the range, and in standard errors. At one episode a second,
# rewards that stay as they are seem to fall less than once a week.
LEAST_FALL: Final = 0.15
ERRORS: Final = 4.25

Value = tuple[str, float]


class OwnPast:
    """Follow rewards in their order, as values of 0 to 1 with the family of their task.

    Attributes:
        fall: by how much they fell, when that was first seen; None while it is not.
    """

    def __init__(self) -> None:
        """Begin without a past."""
        self._values: deque[Value] = deque(maxlen=PAST + WINDOWS[-1])
        self._count = 0
        self.fall: float | None = None

    def add(self, value: Value, *, is_past: bool = False) -> None:
        """Take in a value; those that are past are what the others are compared with."""
        self._values.append(value)
        self._count += not is_past
        if self.fall is None and not is_past and self._count % STEP == 0:
            values = list(self._values)
            falls = [fall_of(values, new) for new in WINDOWS if new <= self._count]
            self.fall = max((fall for fall in falls if fall is not None), default=None)


def fall_of(values: Sequence[Value], new: int) -> float | None:
    """Return by how much the `new` last values are below those before, None if it does not count.

    Values are compared with those of the same family.
    """
    if len(values) - new < FEWEST_BEFORE:
        return None
    before, after = _by_family(values[:-new]), _by_family(values[-new:])
    both = before.keys() & after.keys()
    count = sum(len(after[family]) for family in both)
    if 2 * count < new:
        return None
    fall = variance = squares = 0.0
    for family in both:
        old, own = before[family], after[family]
        share, mean = len(own) / count, fmean(old + own)
        fall += share * (fmean(old) - fmean(own))
        variance += share**2 * (1 / len(own) + 1 / len(old))
        squares += sum((value - mean) ** 2 for value in old + own)
    squares /= count + sum(len(before[family]) for family in both)
    return fall if fall >= max(LEAST_FALL, ERRORS * sqrt(squares * variance)) else None


def _by_family(values: Iterable[Value]) -> dict[str, list[float]]:
    families = defaultdict(list)
    for family, value in values:
        families[family].append(value)
    return families
