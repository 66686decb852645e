"""Verdicts about runs: what a judge may answer, and what a run's metrics are."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.judging.answers import JudgeFailed, metrics_of, read_verdict

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)


def verdict(value: Any) -> list[dict[str, Any]]:
    return read_verdict(json.dumps(value).encode(), "e1")


@given(NUMBERS)
def test_number_is_the_reward(value: float) -> None:
    assert verdict(value) == [{"metric": "reward", "value": value, "episode": "e1"}]


@given(st.dictionaries(st.text("abcde", min_size=1), NUMBERS, min_size=1))
def test_object_is_metrics(metrics: dict[str, float]) -> None:
    statements = verdict(metrics)
    assert {one["metric"]: one["value"] for one in statements} == metrics
    assert {one["episode"] for one in statements} == {"e1"}
    assert metrics_of(statements) == metrics


def test_statements_are_taken_as_any_judges() -> None:
    assert verdict({"value": 0.5}) == [{"value": 0.5, "episode": "e1"}]
    assert verdict([{"value": 1, "response": "r"}, {"metric": "style", "value": 0}]) == [
        {"value": 1, "response": "r"},
        {"metric": "style", "value": 0, "episode": "e1"},
    ]


@pytest.mark.parametrize("answer", [b"null", b" null\n", b'{"value": null}', b'{"reward": null}'])
def test_judge_that_cannot_tell_states_nothing(answer: bytes) -> None:
    assert read_verdict(answer, "e1") == []


@pytest.mark.parametrize(
    ("answer", "message"),
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
def test_answer_that_is_no_verdict_is_refused(answer: bytes, message: str) -> None:
    with pytest.raises(JudgeFailed, match=message):
        read_verdict(answer, "e1")


def test_rewards_for_parts_count_by_their_mean() -> None:
    statements = [{"value": 1}, {"metric": "reward", "value": 0}, {"metric": "x"}]
    assert metrics_of(statements) == {"reward": 0.5}
    assert metrics_of([{"metric": "tool_status", "value": "ok"}]) == {}
