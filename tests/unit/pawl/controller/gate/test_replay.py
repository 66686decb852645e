"""What the answers of a candidate say about it, and which tool calls could be executed."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.controller.gate.replay import (
    Answer,
    ReplayRule,
    is_malformed,
    offered_tools,
    verdict,
)

RULE = ReplayRule(replay_states=4, most_kl_to_serving=0.5, most_malformed=0.2)


def answer(
    own: float = -1.0,
    serving: float = -1.0,
    malformed: tuple[bool | None, bool | None] = (None, None),
) -> Answer:
    return Answer(split="eval", own=(own, own), serving=(serving, serving), malformed=malformed)


def test_kl_is_the_mean_over_tokens_of_k3() -> None:
    found = verdict([answer(-1.0, -1.5), answer(-1.0, -0.5)], 0, RULE)
    first, second = math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1
    assert found.kl == pytest.approx((first + second) / 2)
    assert found.why_not is None


@pytest.mark.parametrize("serving", [800.0, -2000.0, math.inf, math.nan])
def test_figures_that_no_float_holds_let_no_candidate_pass(serving: float) -> None:
    assert verdict([answer(-1000.0, serving)], 0, RULE).why_not is not None


def test_malformed_calls_count_by_how_much_more_they_are_than_of_what_serves() -> None:
    bad, good = answer(malformed=(True, False)), answer(malformed=(False, False))
    found = verdict([bad, good, good], 0, RULE)
    assert found.malformed == (pytest.approx(1 / 3), 0.0)
    assert found.why_not is not None
    assert "33% of its tool calls are malformed, and 0% of" in found.why_not
    assert verdict([bad, good, good, good, good, good], 0, RULE).why_not is None
    # What serves is no better.
    both = answer(malformed=(True, True))
    assert verdict([both, both], 0, RULE).why_not is None


def test_one_answer_that_only_the_candidate_is_refused_stops_it() -> None:
    found = verdict([answer(), Answer(split="eval", is_missing=True)], 0, RULE)
    assert (found.states, found.held_out, found.missing, found.kl) == (1, 1, 1, 0.0)
    assert found.why_not is not None
    assert "refused 1 of 2 answers" in found.why_not


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}, "c": {}},
    "required": ["a"],
}
TOOLS = {"add": SCHEMA, "free": None}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (CALL, False),
        (f"I shall add. {CALL} {CALL}", False),
        ('{"name": "add", "parameters": {"a": 1}}', False),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', False),
        ('<tool_call>{"name": "free", "arguments": {"x": [1]}}</tool_call>', False),
        ('<tool_call>{"name": "free"}</tool_call>', False),
        # Nothing that could be judged.
        ("The sum is 3.", None),
        ('{"sum": 3}', None),
        ("", None),
        # Malformed.
        ("<tool_call>\n{'name': 'add'}\n</tool_call>", True),
        (CALL + "<tool_call>{</tool_call>", True),
        ('<tool_call>{"name": "multiply", "arguments": {}}</tool_call>', True),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', True),
        ('<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>', True),
        ('<tool_call>{"name": "add", "arguments": {"a": true}}</tool_call>', True),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', True),
        ("<tool_call>[]</tool_call>", True),
        ('<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', True),
        ("<tool_call>" + 20_000 * "[" + "</tool_call>", True),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', False),
        ('<tool_call>{"name": "add", "argu', True),
    ],
)
def test_tool_calls_of_a_whole_reply(text: str, wanted: bool | None) -> None:
    assert is_malformed(text, TOOLS, is_whole=True) is wanted


def test_tool_call_that_was_cut_off_is_not_judged_for_that() -> None:
    assert is_malformed('<tool_call>{"name": "ad', TOOLS, is_whole=False) is None
    assert is_malformed('{"name": "ad', TOOLS, is_whole=False) is None
    assert is_malformed(CALL + '<tool_call>{"na', TOOLS, is_whole=False) is False


def test_tool_calls_are_not_judged_without_tools() -> None:
    assert is_malformed(CALL, {}, is_whole=True) is None


def test_tools_are_read_of_each_wire_format() -> None:
    schema = {"type": "object"}
    chat = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    responses = {"tools": [{"type": "function", "name": "f", "parameters": schema}]}
    messages = {"tools": [{"name": "f", "input_schema": schema}]}
    for request in (chat, responses, messages):
        assert offered_tools(json.dumps(request).encode()) == {"f": schema}
    assert offered_tools(json.dumps({"tools": [{"name": "f"}, 3, {}]}).encode()) == {"f": None}
    for odd in (None, b"", b"{", b"[]", b'{"tools": 1}', b"\xff"):
        assert offered_tools(odd) == {}


@given(text=st.text(alphabet='{}[]":,<>/_tol calnmergus1'), is_whole=st.booleans())
def test_tool_calls_of_any_text_are_read(text: str, is_whole: bool) -> None:
    for one in (text, f"<tool_call>{text}</tool_call>"):
        assert is_malformed(one, TOOLS, is_whole=is_whole) in (None, True, False)
