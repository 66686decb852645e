"""A tool call that an agent makes of a reply's text names that text, and no other."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.ingester.transcribe import transcribe
from proxy.tool_events import MOST_QUOTES, parse_readers, quoted_digests, text_digest
from store.records import CallRecord
from tests.support.records import captured

SQL = "SELECT COUNT(*)\nFROM employee WHERE name = 'é'"
# Backticks alone are a fence, or what is left of one, and no text.
TEXTS = (
    st.text(min_size=1)
    .map(str.strip)
    .filter(lambda text: bool(text.strip("`")) and "```" not in text)
)


@given(TEXTS, st.sampled_from(["", " ", "\n", "\t\n"]))
def test_blanks_around_a_text_and_a_fence_make_no_difference(text: str, blanks: str) -> None:
    assert text_digest(f"{blanks}{text}{blanks}") == text_digest(text) is not None
    assert text_digest(f"```sql\n{text}\n```{blanks}") == text_digest(text)


@given(TEXTS, TEXTS)
def test_only_the_whole_text_is_the_same(text: str, other: str) -> None:
    assert (text_digest(text) == text_digest(other)) == (text == other)
    assert text_digest(f"{text}\n{other}") != text_digest(text)
    assert text_digest(f"See:\n```sql\n{text}\n```") != text_digest(text)


@pytest.mark.parametrize("text", ["", " \n", "`", "```sql\n```", "``````"])
def test_a_reply_without_words_is_quoted_by_nobody(text: str) -> None:
    assert text_digest(text) is None


def test_words_that_utf8_cannot_write_have_a_digest() -> None:
    assert text_digest("\ud800") != text_digest("\ud801")


def test_each_text_is_named_once_and_not_more_than_a_few() -> None:
    assert quoted_digests(("a", " a ", "", "b")) == (text_digest("a"), text_digest("b"))
    assert len(quoted_digests([str(number) for number in range(99)])) == MOST_QUOTES


# In every format, through the ingester


def chat(arguments: Any) -> Any:
    call = {"id": "x", "function": {"name": "sql", "arguments": json.dumps(arguments)}}
    result = {"role": "tool", "tool_call_id": "x", "content": "{}"}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, result]}


def messages(arguments: Any) -> Any:
    call = {"type": "tool_use", "id": "x", "name": "sql", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "x", "content": "{}"}
    said = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return {"messages": said}


def responses(arguments: Any) -> Any:
    call = {"type": "function_call", "call_id": "x", "name": "sql"}
    call["arguments"] = json.dumps(arguments)
    return {"input": [call, {"type": "function_call_output", "call_id": "x", "output": "{}"}]}


def custom(arguments: Any) -> Any:
    call = {"type": "custom_tool_call", "call_id": "x", "name": "sql", "input": arguments}
    output = {"type": "custom_tool_call_output", "call_id": "x", "output": "{}"}
    return {"input": [call, output]}


def custom_in_a_chat(arguments: Any) -> Any:
    call = {"id": "x", "type": "custom", "custom": {"name": "sql", "input": arguments}}
    result = {"role": "tool", "tool_call_id": "x", "content": "{}"}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, result]}


def recorded(dialect: str, request: Any, rules: str = "*=json_error", **changes: Any) -> CallRecord:
    seen = captured(dialect=dialect, request=json.dumps(request).encode(), **changes)
    return transcribe(seen, parse_readers(rules))


@pytest.mark.parametrize(
    ("dialect", "request_of", "arguments"),
    [
        ("chat", chat, {"query": SQL, "limit": 5, "in": {"text": "not on top"}}),
        ("messages", messages, {"query": f" {SQL}\n"}),
        ("responses", responses, {"query": SQL}),
        ("responses", custom, SQL),
        ("chat", custom_in_a_chat, SQL),
    ],
)
def test_a_result_names_the_texts_that_its_call_was_made_of(
    dialect: str, request_of: Any, arguments: Any
) -> None:
    [event] = recorded(dialect, request_of(arguments)).tool_events
    assert event.quotes == (text_digest(SQL),)


@pytest.mark.parametrize("arguments", [3, None, [], {}, {"a": 1}, [SQL], "", {"": ""}])
def test_arguments_without_a_text_quote_nothing(arguments: Any) -> None:
    [event] = recorded("chat", chat(arguments)).tool_events
    assert event.quotes == ()


def reply(message: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return json.dumps({"id": "r", "choices": [choice]}).encode()


MESSAGE = {"id": "m", "type": "message", "content": [{"type": "text", "text": SQL}]}
ITEM = {"type": "message", "content": [{"type": "output_text", "text": SQL}]}
RESPONSE = {"id": "r", "object": "response", "status": "completed", "output": [ITEM]}
COMPLETION = {"id": "c", "choices": [{"index": 0, "text": SQL}]}


@pytest.mark.parametrize(
    ("dialect", "request_body", "told"),
    [
        ("chat", {"messages": []}, reply({"content": f"{SQL}\n"})),
        ("messages", {"messages": []}, json.dumps(MESSAGE).encode()),
        ("responses", {"input": []}, json.dumps(RESPONSE).encode()),
        ("completions", {"prompt": "q"}, json.dumps(COMPLETION).encode()),
    ],
)
def test_a_replys_whole_text_can_be_named(dialect: str, request_body: Any, told: bytes) -> None:
    made = recorded(dialect, request_body, reply=told)
    assert made.text_digest == text_digest(SQL)


def test_a_streamed_replys_too() -> None:
    chunks = [
        {"id": "r", "choices": [{"index": 0, "delta": {"content": piece}}]}
        for piece in (SQL[:5], SQL[5:])
    ]
    sent = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    made = recorded(
        "chat", {"messages": [], "stream": True}, reply=sent + b"data: [DONE]\n\n", streamed=True
    )
    assert made.text_digest == text_digest(SQL)


def test_what_asks_for_tools_itself_is_not_named_by_its_words() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "sql", "arguments": "{}"}}
    told = reply({"content": SQL, "tool_calls": [call]})
    assert recorded("chat", {"messages": []}, reply=told).text_digest is None


def test_where_no_result_is_read_no_text_is_digested() -> None:
    told = reply({"content": SQL})
    assert recorded("chat", {"messages": []}, rules="", reply=told).text_digest is None
