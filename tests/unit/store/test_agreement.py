"""How far a judge agrees with facts, and what it is trusted with."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.read.agreement import LEAST_AGREEMENT, Agreement, agreement


def measured(right: float, *, facts: int = 200, success: float = 0.4, seed: int = 1) -> Agreement:
    """The agreement of a judge that is right in this share of its statements."""
    dice = random.Random(seed)
    pairs = []
    for _ in range(facts):
        fact = float(dice.random() < success)
        pairs.append(("reward", fact if dice.random() < right else 1 - fact, fact))
    share, error = agreement(pairs)
    return Agreement(source="j", statements=facts, compared=facts, share=share, error=error)


def test_judges_agreement_is_the_share_of_pairs_in_the_order_of_the_facts() -> None:
    # Of six pairs that differ, the opinions order three alike, one the other way, and two not.
    facts, opinions = (0.0, 0.5, 1.0, 2.0), (0.1, 0.1, 0.9, 0.1)
    pairs = [("reward", own, fact) for own, fact in zip(opinions, facts, strict=True)]
    assert agreement(pairs)[0] == pytest.approx((2 + 3 * 0.5) / 6)
    # No scale matters, and metrics are not mixed.
    other = [("reward", 100 * own - 7, fact) for own, fact in zip(opinions, facts, strict=True)]
    assert agreement([*other, ("style", 0.0, 9.0)]) == agreement(pairs)


def test_equal_facts_measure_no_agreement_of_a_judge() -> None:
    assert agreement([("reward", 0.1, 1.0), ("reward", 0.9, 1.0)]) == (None, None)
    assert Agreement(source="j", statements=9, compared=2).trust == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_random_and_flattering_judges_have_no_trust(seed: int) -> None:
    assert measured(0.5, seed=seed).trust == 0.0
    share, error = agreement([("reward", 1.0, float(place % 2)) for place in range(40)])
    flatters = Agreement(source="j", statements=40, compared=40, share=share, error=error)
    assert (flatters.share, flatters.trust) == (0.5, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_trust_grows_with_the_share_of_right_statements(seed: int) -> None:
    # 0.8 of both kinds are right: 2 * 0.8 - 1 of a fact.
    assert measured(0.8, seed=seed).trust == pytest.approx(0.6, abs=0.2)
    assert measured(1.0, seed=seed).trust == 1.0


def test_error_of_agreement_equals_the_spread_of_many_draws() -> None:
    drawn = [measured(0.7, facts=60, seed=seed) for seed in range(300)]
    shares = [one.share or 0.0 for one in drawn]
    mean = sum(shares) / len(shares)
    spread = (sum((share - mean) ** 2 for share in shares) / len(shares)) ** 0.5
    assert sum(one.error or 0.0 for one in drawn) / len(drawn) == pytest.approx(spread, rel=0.15)
    assert mean > LEAST_AGREEMENT


@given(st.lists(st.tuples(st.sampled_from("ab"), *[st.sampled_from((0.0, 0.5, 1.0))] * 2)))
def test_judges_agreement_equals_a_comparison_pair_by_pair(
    pairs: list[tuple[str, float, float]],
) -> None:
    compared = [
        0.5 if own == other else float((own > other) == (fact > fact_of_other))
        for metric, own, fact in pairs
        for metric_of_other, other, fact_of_other in pairs
        if metric == metric_of_other and fact != fact_of_other
    ]
    share, _ = agreement(pairs)
    assert share == (pytest.approx(sum(compared) / len(compared)) if compared else None)
