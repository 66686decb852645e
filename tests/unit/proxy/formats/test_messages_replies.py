"""Replies of chat completions become Anthropic's messages, whole and as events."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.message_replies import StreamedMessageReader, WholeMessageReader
from proxy.formats.messages import MESSAGES
from tests.unit.proxy.formats.test_messages import rewritten


def chunk(delta: dict[str, Any], *ids: int, **choice: Any) -> dict[str, Any]:
    tokens = {"token_ids": list(ids), "logprobs": {"content": [{"logprob": -0.5} for _ in ids]}}
    told = {"index": 0, "delta": delta, "finish_reason": None} | (tokens if ids else {}) | choice
    return {"id": "chatcmpl-1", "model": "agent@3", "choices": [told]}


HEAD = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2]}
USAGE = {"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


def sse(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks)


def streamed(data: bytes) -> tuple[list[dict[str, Any]], StreamedMessageReader]:
    reply = StreamedMessageReader(rewritten({"stream": True}), "agent@3")
    out = reply.feed(data) + reply.finish()
    blocks = [block.split(b"\n") for block in out.split(b"\n\n")[:-1]]
    events = [json.loads(lines[1][6:]) for lines in blocks if not lines[0].startswith(b":")]
    assert [lines[0][7:].decode() for lines in blocks if lines[0][:1] == b"e"] == [
        event["type"] for event in events
    ]
    return events, reply


def call(index: int, **told: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index} | told]}


def test_text_between_and_after_tool_calls_waits_for_their_end() -> None:
    events, reply = streamed(
        sse(
            HEAD,
            chunk({"content": "a"}, 3),
            chunk(call(0, id="t1", function={"name": "calc", "arguments": '{"a"'}), 4),
            chunk({"content": "b"}),
            chunk(call(0, function={"arguments": ": 1}"})),
            chunk(call(1, id="t2", function={"name": "calc", "arguments": "{}"}), 5),
            chunk({}, finish_reason="tool_calls"),
            USAGE,
        )
        + b"data: [DONE]\n\n"
    )
    content = json.loads(reply.facts().reply or b"")["content"]
    assert content == [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "t1", "name": "calc", "input": {"a": 1}},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "t2", "name": "calc", "input": {}},
    ]
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1, 2, 3]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    sampled = reply.facts().sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2), (3, 4, 5))
    assert [c.id for c in reply.summary().tool_calls] == ["t1", "t2"]


@pytest.mark.parametrize(
    ("finish", "stop", "arguments", "reason"),
    [
        ("stop", None, None, ("end_turn", None)),
        ("stop", 2, None, ("end_turn", None)),
        ("stop", "END", None, ("stop_sequence", "END")),
        ("length", None, None, ("max_tokens", None)),
        ("length", None, "{}", ("max_tokens", None)),
        ("stop", "END", "{}", ("tool_use", None)),
        ("stop", "END", '{"a', ("stop_sequence", "END")),
        ("tool_calls", None, '{"a', ("tool_use", None)),
        ("abort", None, None, (None, None)),
    ],
)
def test_stop_reasons(finish: str, stop: Any, arguments: str | None, reason: Any) -> None:
    calls = (
        []
        if arguments is None
        else [call(0, id="t", function={"name": "c", "arguments": arguments})]
    )
    last = chunk({}, finish_reason=finish, stop_reason=stop)
    events, _ = streamed(sse(HEAD, *(chunk(c) for c in calls), last, USAGE))
    assert tuple(events[-1]["delta"].values()) == reason


def test_the_last_event_is_held_back_and_comments_pass() -> None:
    reply = StreamedMessageReader(rewritten({}), "agent@3")
    sent = reply.feed(sse(HEAD, USAGE) + b": still here\r\n\r\ndata: [DONE]\n\n")
    assert b"message_delta" in sent
    assert sent.endswith(b": still here\n\n")
    assert reply.finish() == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', "out of memory"),
        (b'data: {"object": "error", "message": "gone"}\n\n', "gone"),
        (b"data: <html>\n\n", "not a chunk of a chat completion"),
        (b'data: {"choices": [7]}\n\n', "not a chunk of a chat completion"),
        (
            b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n',
            "not a chunk of a chat completion",
        ),
    ],
)
def test_an_error_in_a_stream_is_anthropics_and_ends_it(data: bytes, message: str) -> None:
    events, reply = streamed(sse(HEAD) + data + sse(USAGE) + b"data: [DONE]\n\n")
    assert events[-1]["type"] == "error"
    assert message in events[-1]["error"]["message"]
    assert not reply.facts().whole


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            {"error": {"message": "no", "type": "NotFoundError", "code": 404}},
            "not_found_error",
            "no",
        ),
        (
            {"object": "error", "message": "old", "type": "X", "code": 400},
            "invalid_request_error",
            "old",
        ),
        (
            {"error": {"message": "kind", "type": "BadRequestError", "code": None}},
            "invalid_request_error",
            "kind",
        ),
        ({"error": {"message": "bare"}}, "api_error", "bare"),
    ],
)
def test_errors_take_anthropics_shape(body: Any, kind: str, message: str) -> None:
    reply = WholeMessageReader(rewritten({}), "agent@3")
    reply.feed(json.dumps(body).encode())
    wanted = {"type": "error", "error": {"type": kind, "message": message}}
    assert json.loads(reply.finish()) == wanted


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (409, "conflict_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (507, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_errors_type_is_that_of_its_status(status: int, kind: str) -> None:
    """Whole, by the reply's own status; in a stream, where there is none, by vLLM's code."""
    said = {"message": "no", "type": "SomeError", "param": None, "code": status}
    whole = MESSAGES.whole_reader(rewritten({}), "agent@3", status=status)
    whole.feed(json.dumps({"error": said | {"code": "word"}}).encode())
    wanted = {"type": "error", "error": {"type": kind, "message": "no"}}
    assert json.loads(whole.finish()) == wanted
    events, _ = streamed(sse(HEAD, {"error": said}))
    assert events[-1] == wanted


def test_an_error_in_a_stream_without_a_code_has_the_type_of_vllms_class() -> None:
    events, _ = streamed(sse(HEAD, {"error": {"message": "no", "type": "NotFoundError"}}))
    assert events[-1]["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "body", [b"<html>502</html>", b"", b"\xff", b"[1]", b'{"a": 1}', b'{"choices": [7]}']
)
def test_what_is_no_chat_completion_passes_byte_for_byte(body: bytes) -> None:
    reply = WholeMessageReader(rewritten({}), "agent@3")
    reply.feed(body)
    assert reply.finish() == body
    reply.facts()


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (
            '{"a": {"b": 1.0}, "n": 123456789012345678901234567890}',
            '{"a":{"b":1.0},"n":123456789012345678901234567890}',
        ),
        ('{"e": "\\ud83d", "u": "\\u00e9"}', '{"e":"\\ud83d","u":"\u00e9"}'),
        ('{"cut', "{}"),
        ("[1]", "{}"),
        ('{"x": NaN}', "{}"),
        ("[" * 100_000, "{}"),
    ],
)
def test_arguments_reach_the_client_as_vllm_writes_them(arguments: str, seen: str) -> None:
    function = {"name": "calc", "arguments": arguments}
    message = {"content": None, "tool_calls": [{"id": "t", "function": function}]}
    body = {
        "id": "c",
        "model": "agent@3",
        "choices": [{"message": message, "finish_reason": "stop"}],
    }
    reply = WholeMessageReader(rewritten({}), "agent@3")
    reply.feed(json.dumps(body).encode())
    assert f'"input":{seen}'.encode() in reply.finish()


@given(st.binary(max_size=300))
def test_any_bytes_become_events_or_nothing(data: bytes) -> None:
    reply = StreamedMessageReader(rewritten({"stream": True}), "agent@3")
    out = reply.feed(data) + reply.finish()
    assert out == b"" or out.endswith(b"\n\n")
    reply.facts()
    reply.summary()
