"""Which tool calls in a raw text could be executed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.steward.gate.replay import is_malformed, offered_tools

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
def test_a_whole_reply(text: str, wanted: bool | None) -> None:
    assert is_malformed(text, TOOLS, is_whole=True) is wanted


def test_what_was_cut_off_is_not_judged_for_that() -> None:
    assert is_malformed('<tool_call>{"name": "ad', TOOLS, is_whole=False) is None
    assert is_malformed('{"name": "ad', TOOLS, is_whole=False) is None
    assert is_malformed(CALL + '<tool_call>{"na', TOOLS, is_whole=False) is False


def test_without_tools_nothing_is_judged() -> None:
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
def test_any_text_is_read(text: str, is_whole: bool) -> None:
    for one in (text, f"<tool_call>{text}</tool_call>"):
        assert is_malformed(one, TOOLS, is_whole=is_whole) in (None, True, False)
