"""Compute 95 % confidence intervals of a mean (pure).

Student's t interval, mean ± t · s / √n, assumes a normally distributed mean; for rewards of 0 and
1 it may leave the range from 0 to 1, and has no width if all are equal. Wilson's score interval
(Wilson 1927, doi:10.1080/01621459.1927.10502953) has neither fault, and Brown, Cai and DasGupta
recommend it for few observations (2001, doi:10.1214/ss/1009213286).

Attempts at one task are not independent. The error of a mean is therefore computed from tasks, and
Wilson's interval for the number of independent values that has this error (Korn and Graubard 1998).
"""

from functools import lru_cache
from math import atan, cos, inf, pi, sin, sqrt, tan
from typing import Final, NamedTuple

# The 97.5 % quantile of the standard normal distribution.
NORMAL_QUANTILE: Final = 1.959963984540054
CONFIDENCE_LEVEL: Final = 0.95
# From here on the quantile is within 0.13 % of the normal one, and is not computed any closer.
MOST_DEGREES_OF_FREEDOM: Final = 1000
# Halvings of an interval of width 16: what is left is below a float's resolution.
BISECTION_STEPS: Final = 60


class Interval(NamedTuple):
    """The limits of a mean's confidence interval."""

    low: float
    high: float


def wilson_interval(mean: float, count: float) -> Interval:
    """Return Wilson's score interval of the mean of `count` values that are all 0 or 1.

    With z = 1.96: (p̂ + z²/2n ± z √(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n).
    """
    z = NORMAL_QUANTILE
    scale = 1 + z * z / count
    centre = (mean + z * z / (2 * count)) / scale
    half = z * sqrt(mean * (1 - mean) / count + z * z / (4 * count * count)) / scale
    # At 0 and 1 the limit is the mean itself, which rounding may miss.
    return Interval(max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def student_interval(mean: float, spread: float, count: int) -> Interval | None:
    """Return Student's interval of a mean of `count` values, or None for fewer than two.

    `spread` is their sample standard deviation, with n - 1 in the denominator.
    """
    if count < 2:
        return None
    half = t_quantile(count - 1) * spread / sqrt(count)
    return Interval(mean - half, mean + half)


def mean_interval(
    mean: float, count: int, tasks: int, error: float, *, zero_or_one: bool
) -> Interval | None:
    """Return the interval of the mean of `count` values, which belong to `tasks` groups.

    It is Wilson's if all values are 0 or 1, else Student's, which needs two groups (else None).
    `error` is the standard error of the mean if only the groups are independent:
    √Σ(sum − size · mean)² / count, where Σ is over the groups.
    """
    if not zero_or_one:
        return student_interval(mean, error * tasks / sqrt(tasks - 1), tasks) if tasks > 1 else None
    if tasks < 2 or mean in (0.0, 1.0):
        return wilson_interval(mean, tasks)
    adjusted = t_quantile(tasks - 1) / t_quantile(count - 1) * error
    effective_count = mean * (1 - mean) / adjusted**2 if adjusted else inf
    return wilson_interval(mean, min(count, effective_count))


@lru_cache(maxsize=MOST_DEGREES_OF_FREEDOM)
def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom."""
    freedom = min(freedom, MOST_DEGREES_OF_FREEDOM)
    if freedom == 1:
        # Its distribution is 1/2 + atan(t)/π, and the quantile lies above all others.
        return tan(pi * CONFIDENCE_LEVEL / 2)
    low, high = NORMAL_QUANTILE, NORMAL_QUANTILE + 16
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if _probability_within(middle, freedom) < CONFIDENCE_LEVEL:
            low = middle
        else:
            high = middle
    return high


def _probability_within(t: float, freedom: int) -> float:
    """Return the probability that Student's t is between -t and t.

    Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    angle = atan(t / sqrt(freedom))
    square = cos(angle) ** 2
    if freedom % 2:
        term = cos(angle)
        total = 0.0
        for step in range(1, freedom - 1, 2):
            total += term
            term *= square * (step + 1) / (step + 2)
        return 2 / pi * (angle + sin(angle) * total)
    term = 1.0
    total = 0.0
    for step in range(0, freedom, 2):
        total += term
        term *= square * (step + 1) / (step + 2)
    return sin(angle) * total
