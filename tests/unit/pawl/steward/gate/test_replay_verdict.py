"""What the answers of a candidate say about it."""

import math

import pytest

from pawl.steward.gate.replay import Answer, ReplayRule, verdict

RULE = ReplayRule(replay_states=4, most_kl_to_serving=0.5, most_malformed=0.2)


def answer(
    own: float = -1.0,
    serving: float = -1.0,
    malformed: tuple[bool | None, bool | None] = (None, None),
) -> Answer:
    return Answer(split="eval", own=(own, own), serving=(serving, serving), malformed=malformed)


def test_equal_policies_are_no_way_apart() -> None:
    found = verdict([answer(), answer()], 1, RULE)
    assert (found.kl, found.tokens, found.states, found.held_out) == (0.0, 4, 2, 2)
    assert (found.left_out, found.missing, found.why_not) == (1, 0, None)


def test_the_kl_is_the_mean_over_tokens_of_k3() -> None:
    found = verdict([answer(-1.0, -1.5), answer(-1.0, -0.5)], 0, RULE)
    first, second = math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1
    assert found.kl == pytest.approx((first + second) / 2)
    assert found.why_not is None


def test_too_far_from_what_serves() -> None:
    found = verdict([answer(-1.0, -9.0)], 0, RULE)
    assert found.why_not is not None
    assert "gate.most_kl_to_serving is 0.5" in found.why_not
    assert found.kl is not None
    assert found.kl > 6


@pytest.mark.parametrize("serving", [800.0, -2000.0, math.inf, math.nan])
def test_figures_that_no_float_holds_pass_nobody(serving: float) -> None:
    assert verdict([answer(-1000.0, serving)], 0, RULE).why_not is not None


def test_more_malformed_calls_than_what_serves() -> None:
    bad, good = answer(malformed=(True, False)), answer(malformed=(False, False))
    found = verdict([bad, good, good], 0, RULE)
    assert found.malformed == (pytest.approx(1 / 3), 0.0)
    assert found.why_not is not None
    assert "33% of its tool calls are malformed, and 0% of" in found.why_not
    assert verdict([bad, good, good, good, good, good], 0, RULE).why_not is None
    # What serves is no better.
    both = answer(malformed=(True, True))
    assert verdict([both, both], 0, RULE).why_not is None


def test_what_only_the_candidate_is_refused() -> None:
    found = verdict([answer(), Answer(split="eval", is_missing=True)], 0, RULE)
    assert (found.states, found.held_out, found.missing, found.kl) == (1, 1, 1, 0.0)
    assert found.why_not is not None
    assert "refused 1 of 2 answers" in found.why_not


def test_nothing_to_answer_stops_nothing() -> None:
    found = verdict([], 3, RULE)
    assert (found.kl, found.malformed, found.why_not) == (None, (None, None), None)
