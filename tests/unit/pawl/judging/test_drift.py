"""Whether a judge has drifted: an error rate that holds whatever the scores are."""

from itertools import permutations, product
from math import fsum, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.judging.sentinels.drift import (
    MOST_EVIDENCE,
    MOST_REFERENCES,
    Scores,
    can_show,
    drift,
    fewest,
)
from pawl.judging.sentinels.shown import MOST_SCORE

SCORE = st.floats(-MOST_SCORE, MOST_SCORE) | st.floats(0, 1) | st.sampled_from([0.0, 1.0])


@st.composite
def sentinels(draw: st.DrawFn, most: int) -> Scores:
    references = draw(st.lists(SCORE, min_size=1, max_size=most))
    newest = draw(st.lists(SCORE, min_size=1, max_size=len(references)))
    return Scores(references, newest)


@settings(max_examples=25, deadline=None)
@given(st.lists(sentinels(2), min_size=1, max_size=2))
def test_the_evidence_is_1_on_average_over_all_orders(given: list[Scores]) -> None:
    """By Markov's inequality it is then at least c in at most one of c orders."""
    orders = [
        [Scores(order[len(one.newest) :], order[: len(one.newest)]) for order in permutations(all_)]
        for one in given
        for all_ in [[*one.newest, *one.references]]
    ]
    told = [drift(order).evidence for order in product(*orders)]
    assert isclose(fsum(told) / len(told), 1, rel_tol=1e-6)


@given(st.lists(sentinels(MOST_REFERENCES), max_size=5))
def test_any_scores_have_figures_that_are_numbers(given: list[Scores]) -> None:
    told = drift(given)
    assert told.compared == len(given)
    assert abs(told.mean) <= told.mean_absolute * (1 + 1e-9)
    assert told.mean_absolute <= 2 * MOST_SCORE
    assert 0 < told.evidence <= MOST_EVIDENCE


@given(st.lists(st.tuples(SCORE, st.integers(1, MOST_REFERENCES)), max_size=30))
def test_a_judge_that_says_the_same_shows_nothing(given: list[tuple[float, int]]) -> None:
    told = drift(Scores([score] * draws, [score] * draws) for score, draws in given)
    assert isclose(told.evidence, 1)
    assert told.mean_absolute == 0


@given(st.lists(sentinels(MOST_REFERENCES), min_size=1, max_size=5))
def test_the_order_of_sentinels_does_not_matter(given: list[Scores]) -> None:
    assert isclose(drift(given).evidence, drift(given[::-1]).evidence, rel_tol=1e-6)


@pytest.mark.parametrize("draws", range(1, MOST_REFERENCES + 1))
@pytest.mark.parametrize("by", [0.01, -0.3])
def test_the_fewest_sentinels_can_show_a_drift_and_fewer_cannot(draws: int, by: float) -> None:
    enough = fewest(draws, 10_000)
    evidence = [
        drift([Scores([0.5] * draws, [0.5 + by] * draws)] * number).evidence
        for number in (enough - 1, enough)
    ]
    assert evidence[0] < 10_000 <= evidence[1]


def test_what_rounding_makes_of_a_score_is_no_difference() -> None:
    thirds = [Scores([1 / 3] * 3, [1 / 3 + 1e-12] * 3)] * 100
    large = [Scores([1e9] * 3, [1e9 + 100] * 3)] * 100
    for sentinels in (thirds, large):
        told = drift(sentinels)
        assert (told.mean, told.mean_absolute) == (0, 0)
        assert isclose(told.evidence, 1)
    # What somebody would say is one, however small.
    told = drift([Scores([0.5] * 3, [0.50001] * 3)] * 100)
    assert told.evidence > 10_000


@pytest.mark.parametrize("references", range(1, MOST_REFERENCES + 1))
def test_few_sentinels_and_few_scores_can_show_no_drift(references: int) -> None:
    enough = fewest(references, 10_000)
    whole, first = Scores([0.5] * references, [0.5] * references), Scores([0.5] * references, [0.5])
    assert can_show([whole] * enough, 10_000)
    assert not can_show([whole] * (enough - 1), 10_000)
    assert not can_show([], 10_000)
    # The first scores after the references tell less than as many as these.
    assert can_show([first] * enough, 10_000) == (references == 1)


def test_a_judge_that_scores_some_higher_and_some_lower_has_drifted() -> None:
    up, down = Scores([0.5] * 3, [0.9] * 3), Scores([0.5] * 3, [0.1] * 3)
    told = drift([up, down] * 8)
    assert isclose(told.mean, 0, abs_tol=1e-12)
    assert isclose(told.mean_absolute, 0.4)
    assert told.evidence > 10_000


def test_a_drift_is_found_among_many_sentinels_and_no_float_overflows() -> None:
    assert drift([Scores([0.5] * 3, [0.6] * 3)] * 2_000).evidence == pytest.approx(MOST_EVIDENCE)


def test_one_change_of_a_judge_that_never_differs_is_not_evidence_enough() -> None:
    same = [Scores([0.5] * 3, [0.5] * 3)] * 19
    assert drift([*same, Scores([0.5] * 3, [0.5, 0.5, 0.9])]).evidence < 10


def test_nothing_to_compare_shows_nothing() -> None:
    told = drift([])
    assert (told.compared, told.mean, told.mean_absolute) == (0, 0, 0)
    assert told.evidence == pytest.approx(1)
