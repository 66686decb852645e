"""Confidence intervals against published figures, and what must hold for any observations."""

from math import sqrt
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.read.evaluations import Rewards
from store.values.intervals import (
    NORMAL_QUANTILE,
    Interval,
    mean_interval,
    student_interval,
    t_quantile,
    wilson_interval,
)


# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2: critical values of Student's t.
@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        *((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365)),
        *((8, 2.306), (9, 2.262), (10, 2.228), (15, 2.131), (20, 2.086), (29, 2.045), (30, 2.042)),
        *((31, 2.040), (60, 2.000), (99, 1.984), (100, 1.984)),
    ],
)
def test_students_quantiles_equal_published_figures(freedom: int, quantile: float) -> None:
    assert round(t_quantile(freedom), 3) == quantile


def test_very_many_degrees_of_freedom_are_a_little_wider_than_a_normal_distribution() -> None:
    assert NORMAL_QUANTILE < t_quantile(10**9) == t_quantile(1000) < 1.0013 * NORMAL_QUANTILE


@given(st.integers(1, 1100))
def test_quantile_never_grows_with_more_observations(freedom: int) -> None:
    assert t_quantile(freedom + 1) <= t_quantile(freedom)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (1, 1, 0.2065, 1.0)],
)
def test_wilsons_interval_equals_published_figures(
    right: int, count: int, low: float, high: float
) -> None:
    found = wilson_interval(right / count, count)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_wilsons_interval_holds_the_mean_and_stays_between_0_and_1(seen: list[bool]) -> None:
    share = mean(seen)
    low, high = wilson_interval(share, len(seen))
    assert 0.0 <= low <= share <= high <= 1.0
    assert low < high


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60))
def test_students_interval_is_centred_on_the_mean(seen: list[float]) -> None:
    interval = student_interval(mean(seen), stdev(seen), len(seen))
    assert interval is not None
    assert interval.low <= mean(seen) <= interval.high


def test_single_observation_has_no_interval() -> None:
    assert student_interval(0.5, 0.0, 1) is None


def of_groups(*groups: list[float]) -> Interval | None:
    """The interval of the mean of all values, each list being those of one task."""
    values = [value for group in groups for value in group]
    centre = mean(values)
    residuals = [sum(group) - len(group) * centre for group in groups]
    error = sqrt(sum(one * one for one in residuals)) / len(values)
    only = {0.0, 1.0}.issuperset(values)
    return mean_interval(centre, len(values), len(groups), error, zero_or_one=only)


def test_interval_of_independent_values_is_wilsons_for_0_and_1_and_students_else() -> None:
    assert of_groups([0], [1], [1], [0], [1]) == pytest.approx(wilson_interval(0.6, 5))
    values = [0.2, 0.5, 0.9]
    expected = student_interval(mean(values), stdev(values), 3)
    assert expected is not None
    assert of_groups([0.2], [0.5], [0.9]) == pytest.approx(expected)
    assert of_groups([0.5]) is None


def test_interval_accounts_for_dependent_attempts_at_a_task() -> None:
    alike = [[1.0] * 8, [0.0] * 8, [1.0] * 8, [0.0] * 8, [1.0] * 8]
    # Each task decides all of its eight attempts: they are worth little more than five values.
    assert of_groups(*alike) == pytest.approx(wilson_interval(0.6, 5), abs=0.13)
    graded = [[0.2] * 8, [0.5] * 8, [0.9] * 8]
    assert of_groups(*graded) == pytest.approx(of_groups([0.2], [0.5], [0.9]))
    # Attempts that differ within each task as much as between tasks are worth as many values.
    mixed = [[1.0, 0.0] * 4 for _ in range(20)]
    assert of_groups(*mixed) == pytest.approx(wilson_interval(0.5, 160))
    assert of_groups([1.0] * 8) == wilson_interval(1.0, 1)


def test_lift_is_beyond_doubt_only_with_enough_rewards() -> None:
    def of(mean: float, count: int) -> Rewards:
        low, high = wilson_interval(mean, count)
        return Rewards(episodes=count, scored=count, mean=mean, low=low, high=high)

    # Newcombe 1998, method 10, by hand.
    assert of(0.7, 80).lift_over(of(0.3, 80)) == pytest.approx((0.2474, 0.5263), abs=1e-3)
    few = of(0.7, 5).lift_over(of(0.3, 5))
    assert few is not None
    assert few.low < 0 < few.high
    without = Rewards(episodes=1, scored=0)
    assert of(0.7, 80).lift_over(without) is None
