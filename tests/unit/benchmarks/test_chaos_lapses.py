"""Chaos takes a lost call for marked where it was recorded in a lapse, and nowhere else."""

import time

import pytest

from benchmarks.chaos.ledger import within
from benchmarks.chaos.load import Outcome

LAPSES = [(100.0, 110.0), (200.0, 200.5)]


@pytest.mark.parametrize(
    ("call", "marked"),
    [
        ((101.0, 102.0), True),
        ((90.0, 101.0), True),
        ((109.0, 120.0), True),
        ((90.0, 99.9), False),
        ((110.1, 199.0), False),
        ((110.1, 200.1), True),
    ],
)
def test_a_call_is_marked_by_a_lapse_that_it_may_have_been_recorded_in(
    call: tuple[float, float], marked: bool
) -> None:
    assert within(call, LAPSES) is marked


def test_calls_are_timed_by_the_clock_of_the_lapses() -> None:
    outcome = Outcome(complete=["c"], took=[(time.monotonic(), 2.0)])
    [(began, ended)] = outcome.times().values()
    assert ended - began == pytest.approx(2.0)
    assert ended == pytest.approx(time.time(), abs=60.0)
