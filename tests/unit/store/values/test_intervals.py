"""Confidence intervals against published figures, and what must hold for any observations."""

from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.values.intervals import NORMAL, mean_interval, student, t_quantile, wilson


# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2: critical values of Student's t.
@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        *((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365)),
        *((8, 2.306), (9, 2.262), (10, 2.228), (15, 2.131), (20, 2.086), (29, 2.045), (30, 2.042)),
        *((31, 2.040), (60, 2.000), (99, 1.984), (100, 1.984)),
    ],
)
def test_students_quantiles_are_the_published_ones(freedom: int, quantile: float) -> None:
    assert round(t_quantile(freedom), 3) == quantile


def test_very_many_degrees_of_freedom_are_a_little_wider_than_a_normal_distribution() -> None:
    assert NORMAL < t_quantile(10**9) == t_quantile(1000) < 1.0013 * NORMAL


@given(st.integers(1, 1100))
def test_more_observations_never_widen(freedom: int) -> None:
    assert t_quantile(freedom + 1) <= t_quantile(freedom)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (1, 1, 0.2065, 1.0)],
)
def test_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    found = wilson(right / count, count)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_wilsons_interval_holds_the_mean_and_stays_between_0_and_1(seen: list[bool]) -> None:
    share = mean(seen)
    low, high = wilson(share, len(seen))
    assert 0.0 <= low <= share <= high <= 1.0
    assert low < high


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60))
def test_students_interval_is_centred_on_the_mean(seen: list[float]) -> None:
    interval = student(mean(seen), stdev(seen), len(seen))
    assert interval is not None
    assert interval.low <= mean(seen) <= interval.high


def test_one_observation_has_no_interval() -> None:
    assert student(0.5, 0.0, 1) is None


def test_interval_of_a_mean_is_wilsons_for_0_and_1_and_students_else() -> None:
    assert mean_interval(0.5, 0.5, 8, zero_or_one=True) == wilson(0.5, 8)
    assert mean_interval(0.5, 0.5, 8, zero_or_one=False) == student(0.5, 0.5, 8)
    assert mean_interval(0.5, None, 1, zero_or_one=False) == (0.5, 0.5)
