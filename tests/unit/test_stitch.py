"""Joining calls without a name: by a tool call that is answered, by an attempt that is repeated."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.stitch import Stitches, repeated_tool_ids

A, B = "chatcmpl-tool-aaaaaaaa", "chatcmpl-tool-bbbbbbbb"
FORMS: list[dict[str, Any]] = [
    {"messages": [{"role": "tool", "tool_call_id": A, "content": "1"}]},
    {"input": [{"type": "function_call_output", "call_id": A, "output": "1"}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": A}]}]},
]


@pytest.mark.parametrize("fields", FORMS, ids=["chat", "responses", "messages"])
def test_an_answered_tool_call_joins_its_episode(fields: dict[str, Any]) -> None:
    stitches = Stitches()
    assert stitches.joined(fields) is None
    stitches.handed_out([A], "e1")
    assert stitches.joined(fields) == "e1"


def test_an_id_that_two_episodes_were_given_joins_nothing() -> None:
    stitches = Stitches()
    stitches.handed_out([A], "e1")
    stitches.handed_out([A], "e2")
    assert stitches.joined(FORMS[0]) is None


def test_a_request_that_answers_two_episodes_is_in_doubt() -> None:
    stitches = Stitches()
    stitches.handed_out([A], "e1")
    stitches.handed_out([B], "e2")
    both = [{"role": "tool", "tool_call_id": tool_id} for tool_id in (A, B)]
    assert stitches.joined({"messages": both}) is None


def test_counters_are_no_sign() -> None:
    stitches = Stitches()
    stitches.handed_out(["call_1"], "e1")
    assert stitches.joined({"messages": [{"role": "tool", "tool_call_id": "call_1"}]}) is None


def test_a_failed_attempt_is_joined_once() -> None:
    stitches = Stitches()
    stitches.failed(b"body", "e1")
    stitches.failed(b"body", "e2")
    assert {stitches.retried(b"body"), stitches.retried(b"body")} == {"e1", "e2"}
    assert stitches.retried(b"body") is None
    assert stitches.retried(b"other") is None


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=14),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["content", "tool_call_id", "call_id", "type", "tool_use_id"]), inner
        )
    ),
)


@given(JSON, JSON)
def test_any_request_can_be_read(messages: Any, given_input: Any) -> None:
    found = list(repeated_tool_ids({"messages": messages, "input": given_input}))
    assert all(isinstance(tool_id, str) for tool_id in found)
