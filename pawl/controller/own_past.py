"""Test whether rewards have fallen below their own past, whatever the version (pure).

Without a control it is unknown whether the version is at fault or tasks became harder, so a fall
only stops training. In return it is seen after half as many episodes.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean
from typing import Final

# The newest WINDOWS episodes are compared with those before them. PAST bounds how many are kept
# before the longest window.
WINDOWS: Final = (64, 112)
PAST: Final = 400
FEWEST_BEFORE: Final = 64
# The test runs every STEP episodes.
STEP: Final = 16
# The least fall that counts: as a share of the range, and in standard errors. At one episode a
# second, constant rewards cause less than one false alarm a week.
LEAST_FALL: Final = 0.15
ERRORS: Final = 4.25

Value = tuple[str, float]


class OwnPast:
    """A sequence of rewards, as values of 0 to 1 with the family of their task.

    Attributes:
        fall: how far they fell, when that was first seen; None before.
    """

    def __init__(self) -> None:
        self._values: deque[Value] = deque(maxlen=PAST + WINDOWS[-1])
        self._count = 0
        self.fall: float | None = None

    def add(self, value: Value, *, is_past: bool = False) -> None:
        """Add a value; a past value is only compared with, never tested."""
        self._values.append(value)
        self._count += not is_past
        if self.fall is None and not is_past and self._count % STEP == 0:
            values = list(self._values)
            falls = [fall_of(values, new) for new in WINDOWS if new <= self._count]
            self.fall = max((fall for fall in falls if fall is not None), default=None)


def fall_of(values: Sequence[Value], new: int) -> float | None:
    """Return how far the last `new` values are below earlier values of their families.

    None if that is too little to count, or if there are too few values.
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
