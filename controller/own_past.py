"""Test whether rewards have fallen below their own past, whatever the version (pure).

Without a control it is unknown whether the version is at fault or tasks became harder, so a fall
only stops training. In return a fall is seen after half the episodes that a control needs.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean
from typing import Final, NamedTuple

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
LEAST_STANDARD_ERRORS: Final = 4.25


class Scored(NamedTuple):
    """A reward as a `value` of 0 to 1, with its task (None: unknown) and the task's family."""

    family: str
    task: str | None
    value: float


class OwnPast:
    """The newest rewards in order, tested for a fall at every STEP added ones.

    Attributes:
        fall: the first fall found, as a share of the range; None before.
    """

    def __init__(self) -> None:
        self._values: deque[Scored] = deque(maxlen=PAST + WINDOWS[-1])
        self._count = 0
        self.fall: float | None = None

    def add(self, value: Scored, *, is_past: bool = False) -> None:
        """Add a value; a past value is only compared with, never tested."""
        self._values.append(value)
        self._count += not is_past
        if self.fall is None and not is_past and self._count % STEP == 0:
            values = list(self._values)
            falls = [fall_of(values, new) for new in WINDOWS if new <= self._count]
            self.fall = max((fall for fall in falls if fall is not None), default=None)


def fall_of(values: Sequence[Scored], new: int) -> float | None:
    """Return how far the last `new` values are below earlier values of their families.

    None if the difference is too small to count, or if there are too few values.
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
        share, mean = len(own) / count, _mean(old + own)
        fall += share * (_mean(old) - _mean(own))
        variance += share**2 * (1 / len(own) + 1 / len(old))
        squares += sum((one.value - mean) ** 2 for one in old + own)
    squares /= count + sum(len(before[family]) for family in both)
    samples = (side[family] for side in (before, after) for family in both)
    variance *= squares * _design_effect(samples)
    return fall if fall >= max(LEAST_FALL, LEAST_STANDARD_ERRORS * sqrt(variance)) else None


def _design_effect(samples: Iterable[Sequence[Scored]]) -> float:
    """Return a mean's variance relative to that of as many independent values, at least 1.

    Tries of one task often end alike (https://en.wikipedia.org/wiki/Design_effect). The tasks of a
    sample are compared with its mean; unknown tasks count as different.
    """
    of_tasks = of_values = 0.0
    for sample in samples:
        mean, gaps = _mean(sample), defaultdict[object, float](float)
        for place, one in enumerate(sample):
            gaps[place if one.task is None else one.task] += one.value - mean
            of_values += (one.value - mean) ** 2
        of_tasks += sum(gap**2 for gap in gaps.values())
    return max(1.0, of_tasks / of_values) if of_values else 1.0


def _by_family(values: Iterable[Scored]) -> dict[str, list[Scored]]:
    families = defaultdict(list)
    for one in values:
        families[one.family].append(one)
    return families


def _mean(values: Iterable[Scored]) -> float:
    return fmean(one.value for one in values)
