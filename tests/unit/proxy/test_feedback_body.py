"""POST /feedback: what may be said, and how what may not is refused."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from proxy.errors import BadRequest
from proxy.feedback_body import parse_feedback
from store.ids import new_id

NOW = datetime(2026, 11, 20, tzinfo=UTC)


def parse(value: Any, key: str | None = None) -> Any:
    return parse_feedback(json.dumps(value).encode(), NOW, key)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"value": True}, 1.0),
        ({"value": False}, 0.0),
        ({"value": 3}, 3.0),
        ({"value": "good"}, "good"),
        ({"value": "v1.2"}, "v1.2"),
        ({"withdrawn": True}, None),
        ({"value": None, "withdrawn": True}, None),
        ({"value": 1, "withdrawn": False}, 1.0),
    ],
)
def test_feedback_value_is_a_number_a_truth_value_a_text_or_withdrawn(
    said: dict[str, Any], kept: float | str | None
) -> None:
    [item] = parse(said | {"episode": "e"}).items
    assert item.value == kept
    assert type(item.value) is type(kept)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"value": [1], "episode": "e"}, "value must be a finite number, true, false or a short"),
        ({"value": "0.8", "episode": "e"}, "without quotes"),
        ({"value": "false", "episode": "e"}, "without quotes"),
        ({"value": "nan", "episode": "e"}, "without quotes"),
        ({"value": "", "episode": "e"}, "1 to 256"),
        ({"value": "x" * 257, "episode": "e"}, "1 to 256"),
        ({"value": "a\x00", "episode": "e"}, "U\\+0000"),
        ({"value": None, "episode": "e"}, "withdrawn"),
        ({"value": 1, "withdrawn": True, "episode": "e"}, "left out where withdrawn"),
        ({"value": 1, "withdrawn": 1, "episode": "e"}, "withdrawn must be true or false"),
        ({"metric": "tool_status", "withdrawn": True, "episode": "e"}, "not a field"),
        ({"correction": "so", "episode": "e"}, "value must be a finite number"),
        ({"value": 0, "correction": 1, "episode": "e"}, "correction must be a string of at most"),
        ({"value": 0, "correction": "s" * 65_537, "episode": "e"}, "at most 65536 characters"),
        ({"value": 0, "correction": " ", "episode": "e"}, "correction must be the right reply"),
        ({"value": 0, "correction": "a\x00", "episode": "e"}, "correction must not .* U\\+0000"),
        ({"withdrawn": True, "correction": "so", "episode": "e"}, "be left out where withdrawn"),
        ({"value": 0, "correction": "so", "source": "j", "episode": "e"}, "correction is a fact"),
        ({"value": 0, "source": "", "episode": "e"}, "source must not be empty"),
        ({"metric": "tool_status", "value": "ok", "source": "j", "episode": "e"}, "source is not"),
        (
            {"metric": "tool_status", "value": "ok", "correction": "so", "episode": "e"},
            "correction is not a field",
        ),
        ({"episode": "e"}, "value"),
        ({"value": 1}, "exactly one of episode, call, response"),
        ({"value": 1, "episode": "e", "call": "c"}, "episode and call"),
        ({"value": 1, "call": "c"}, "x-pawl-call"),
        ({"value": 1, "episode": ""}, "must not be empty"),
        ({"value": 1, "episode": "a\x00"}, "episode"),
        ({"value": 1, "episode": 7}, "episode must be a string"),
        ({"value": 1, "episode": "e", "colour": 1}, "colour"),
        ({"metric": "tool_status", "value": "fine", "episode": "e"}, "ok, error, timeout"),
        ([{"value": 1, "episode": "e"}, {"value": {}, "episode": "e"}], r"\[1\].value"),
        ([], "1 to"),
        ({"value": 1.1e15, "episode": "e"}, "^value must be a number from -1e"),
        ([{"metric": "m", "value": -1.8e307, "episode": "e"}], r"^\[0\].value must be a number"),
        ("reward", "object"),
    ],
)
def test_invalid_feedback_is_refused_with_the_reason(body: Any, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse(body)


@pytest.mark.parametrize("text", ["so", " so\n", "s" * 65_536, "ü"])
def test_correction_beside_a_value_is_kept_unchanged(text: str) -> None:
    [item] = parse({"value": 0, "correction": text, "call": str(new_id())}).items
    assert (item.value, item.correction) == (0.0, text)
    [item] = parse({"value": 0, "correction": None, "episode": "e"}).items
    assert item.correction is None


@pytest.mark.parametrize("value", [1e15, -1e15, 5e-324])
def test_extreme_feedback_values_are_accepted_unchanged(value: float) -> None:
    assert [item.value for item in parse({"value": value, "episode": "e"}).items] == [value]
    duration = {"metric": "tool_status", "value": "ok", "ms": 1e16, "episode": "e"}
    assert parse(duration).items[0].tool is not None


def test_feedback_with_infinite_numbers_or_bad_json_is_refused() -> None:
    huge = b'{"value": 1' + b"0" * 400 + b', "episode": "e"}'
    for body in (b'{"value": 1e999, "episode": "e"}', huge, b'{"value": NaN}', b"{", b"\xff"):
        with pytest.raises(BadRequest):
            parse_feedback(body, NOW, None)
