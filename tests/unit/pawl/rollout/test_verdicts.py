"""Verdicts: what a judge may answer, when an answer is right, and what a run's rewards are."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.judging.errors import JudgeFailed
from pawl.rollout.verdicts import compare, metrics_of, read_verdict, reward_of

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)


def verdict(value: Any) -> list[dict[str, Any]]:
    return read_verdict(json.dumps(value).encode(), "e1")


@given(NUMBERS)
def test_a_number_is_the_reward(value: float) -> None:
    assert verdict(value) == [{"metric": "reward", "value": value, "episode": "e1"}]


@given(st.dictionaries(st.text("abcde", min_size=1), NUMBERS, min_size=1))
def test_an_object_is_metrics(metrics: dict[str, float]) -> None:
    told = verdict(metrics)
    assert {one["metric"]: one["value"] for one in told} == metrics
    assert {one["episode"] for one in told} == {"e1"}
    assert metrics_of(told) == metrics


def test_statements_are_taken_as_any_judges() -> None:
    assert verdict({"value": 0.5}) == [{"value": 0.5, "episode": "e1"}]
    assert verdict([{"value": 1, "response": "r"}, {"metric": "style", "value": 0}]) == [
        {"value": 1, "response": "r"},
        {"metric": "style", "value": 0, "episode": "e1"},
    ]


@pytest.mark.parametrize("answer", [b"null", b" null\n", b'{"value": null}', b'{"reward": null}'])
def test_a_judge_that_cannot_tell_says_nothing(answer: bytes) -> None:
    assert read_verdict(answer, "e1") == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "answered nothing"),
        (b"good", "not JSON"),
        (b"true", "must be a number"),
        (b'"0.5"', "must be a number"),
        (b"{}", "must be an object"),
        (b'{"reward": [1]}', "metric 'reward' must be a finite number, true, false or a text"),
        (b"1e999", "must be a number|not JSON"),
    ],
)
def test_what_is_no_verdict_is_said(answer: bytes, said: str) -> None:
    with pytest.raises(JudgeFailed, match=said):
        read_verdict(answer, "e1")


@pytest.mark.parametrize(
    ("output", "expected", "right"),
    [
        ("42", 42, True),
        ("thinking…\n 42.0 \n\n", "42", True),
        ("1,081.", 1081, True),
        ("41.9", 42, False),
        ("42\nor so", 42, False),
        ("Paris.", "paris", True),
        ("  New   York", "new york", True),
        ("", "paris", False),
        ("b", ["a", "b"], True),
        ("c", ["a", "b"], False),
        ("true", True, True),
        ("1", True, False),
        ('{"a": 1}', {"a": 1}, True),
        ("nan", "NaN", True),
        ("", [], False),
    ],
)
def test_the_last_line_is_compared(output: str, expected: Any, right: bool) -> None:
    assert compare(output, expected) == float(right)


@given(st.text(), st.text() | NUMBERS | st.none() | st.booleans())
def test_any_output_can_be_compared(output: str, expected: Any) -> None:
    assert compare(output, expected) in (0.0, 1.0)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1))
def test_a_text_is_its_own_answer(text: str) -> None:
    assert compare(f"so:\n{text}\n", text) == 1.0


def test_rewards_for_parts_count_by_their_mean() -> None:
    assert reward_of([{"value": 1}, {"metric": "reward", "value": 0}, {"metric": "x"}]) == 0.5
    assert reward_of([{"metric": "tool_status", "value": "ok"}]) is None
