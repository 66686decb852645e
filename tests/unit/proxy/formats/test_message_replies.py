"""Replies to messages: made of chat completions, or forwarded; and forwarded responses."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import read_request
from proxy.formats.messages import MESSAGES
from proxy.formats.registry import FORMATS
from tests.support.recordings import DONE, VERSION, Followed, chunk, cut, follow, rewritten, sse


def call(index: int, **told: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index} | told]}


REQUEST = rewritten("messages")
HEAD = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2]}
USAGE = {"id": "r1", "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


def streamed(data: bytes) -> tuple[list[dict[str, Any]], Followed]:
    reply = follow("messages", rewritten("messages", stream=True), [data], VERSION)
    blocks = [block.split(b"\n") for block in reply.seen.split(b"\n\n")[:-1]]
    events = [json.loads(lines[1][6:]) for lines in blocks if not lines[0].startswith(b":")]
    assert [lines[0][7:].decode() for lines in blocks if lines[0][:1] == b"e"] == [
        event["type"] for event in events
    ]
    return events, reply


def whole(body: bytes, status: int | None = None) -> bytes:
    return follow("messages", REQUEST, [body], VERSION, streamed=False, status=status).seen


def test_streamed_text_between_and_after_tool_calls_is_sent_after_the_tool_calls() -> None:
    events, reply = streamed(
        sse(
            HEAD,
            chunk({"content": "a"}, {3: -0.5}),
            chunk(call(0, id="t1", function={"name": "calc", "arguments": '{"a"'}), {4: -0.5}),
            chunk({"content": "b"}),
            chunk(call(0, function={"arguments": ": 1}"})),
            chunk(call(1, id="t2", function={"name": "calc", "arguments": "{}"}), {5: -0.5}),
            chunk({}, finish_reason="tool_calls"),
            USAGE,
        )
        + DONE
    )
    assert json.loads(reply.facts.reply or b"")["content"] == [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "t1", "name": "calc", "input": {"a": 1}},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "t2", "name": "calc", "input": {}},
    ]
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1, 2, 3]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    sampled = reply.facts.sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2), (3, 4, 5))
    assert [c.id for c in reply.summary.tool_calls] == ["t1", "t2"]


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
def test_anthropics_stop_reason_follows_from_vllms_finish_reason_and_tool_calls(
    finish: str, stop: Any, arguments: str | None, reason: Any
) -> None:
    function = {"name": "c", "arguments": arguments}
    calls = [] if arguments is None else [chunk(call(0, id="t", function=function))]
    last = chunk({}, finish_reason=finish, stop_reason=stop)
    events, _ = streamed(sse(HEAD, *calls, last, USAGE))
    assert tuple(events[-1]["delta"].values()) == reason


def test_final_event_of_a_message_stream_is_held_back_and_comments_pass() -> None:
    parser = MESSAGES.reply_parser(REQUEST, VERSION, streamed=True)
    sent = parser.feed(sse(HEAD, USAGE) + b": still here\r\n\r\ndata: [DONE]\n\n")
    assert b"message_delta" in sent
    assert sent.endswith(b": still here\n\n")
    assert parser.finish() == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


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
def test_error_in_a_message_stream_has_anthropics_shape_and_is_its_last_event(
    data: bytes, message: str
) -> None:
    events, reply = streamed(sse(HEAD) + data + sse(USAGE) + DONE)
    assert events[-1]["type"] == "error"
    assert message in events[-1]["error"]["message"]
    assert not reply.ended


def error(message: str, kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"error": {"message": "no", "type": "NotFoundError", "code": 404}}, "not_found_error"),
        ({"object": "error", "message": "no", "type": "X", "code": 400}, "invalid_request_error"),
        ({"error": {"message": "no", "type": "BadRequestError"}}, "invalid_request_error"),
        ({"error": {"message": "no"}}, "api_error"),
    ],
)
def test_vllms_error_is_translated_to_anthropics_shape(body: Any, kind: str) -> None:
    assert json.loads(whole(json.dumps(body).encode())) == error("no", kind)


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((400, 422), "invalid_request_error"),
        ((401,), "authentication_error"),
        ((403,), "permission_error"),
        ((404,), "not_found_error"),
        ((408, 504), "timeout_error"),
        ((409,), "conflict_error"),
        ((413,), "request_too_large"),
        ((429,), "rate_limit_error"),
        ((500, 501, 502, 507), "api_error"),
        ((503, 529), "overloaded_error"),
    ],
)
def test_anthropics_error_type_follows_from_the_http_status(
    statuses: tuple[int, ...], kind: str
) -> None:
    """Whole, by the reply's own status; in a stream, where there is none, by vLLM's code."""
    for status in statuses:
        said = {"message": "no", "type": "SomeError", "param": None, "code": status}
        body = json.dumps({"error": said | {"code": "word"}}).encode()
        assert json.loads(whole(body, status)) == error("no", kind)
        assert streamed(sse(HEAD, {"error": said}))[0][-1] == error("no", kind)
    events, _ = streamed(sse(HEAD, {"error": {"message": "no", "type": "NotFoundError"}}))
    assert events[-1]["error"]["type"] == "not_found_error"


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
def test_tool_arguments_reach_a_messages_client_as_vllm_writes_them(
    arguments: str, seen: str
) -> None:
    function = {"name": "calc", "arguments": arguments}
    message = {"content": None, "tool_calls": [{"id": "t", "function": function}]}
    choices = [{"message": message, "finish_reason": "stop"}]
    body = json.dumps({"id": "c", "model": VERSION, "choices": choices}).encode()
    assert f'"input":{seen}'.encode() in whole(body)


# Replies that no ids are asked of: untouched but for the name, and put together for the ledger.

MESSAGE = {"id": "msg_1", "model": "m@2", "role": "assistant", "content": [], "usage": {"in": 1}}


def block(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"content_block_{kind}", "index": index} | fields


MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": MESSAGE},
    block(0, "start", content_block={"type": "text", "text": ""}),
    {"type": "ping"},
    block(0, "delta", delta={"type": "text_delta", "text": "h\u00e9"}),
    block(0, "stop"),
    block(1, "start", content_block={"type": "tool_use", "id": "t1", "name": "calc", "input": {}}),
    block(1, "delta", delta={"type": "input_json_delta", "partial_json": '{"a"'}),
    block(1, "delta", delta={"type": "input_json_delta", "partial_json": ": 1}"}),
    block(1, "stop"),
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"out": 5}},
    {"type": "message_stop"},
]
RESPONSE = {
    "id": "resp_1",
    "model": "m@2",
    "status": "completed",
    "output": [{"type": "function_call", "call_id": "c1", "name": "calc", "arguments": "{}"}],
    "usage": {"output_tokens": 3},
}
RESPONSE_EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "response": RESPONSE | {"status": "in_progress", "output": []}},
    {"type": "response.output_text.delta", "delta": "h\u00e9"},
    {"type": "response.completed", "response": RESPONSE},
]
STREAMS = {"messages": MESSAGE_EVENTS, "responses": RESPONSE_EVENTS}


def forwarded(name: str, served: str | None, pieces: list[bytes]) -> Followed:
    request = FORMATS[name].rewrite(read_request(b'{"model":"m"}'), served, want_ids=False)
    return follow(name, request, pieces, served, streamed=True)


@pytest.mark.parametrize("name", STREAMS)
def test_stream_is_unchanged_if_its_model_name_is_not_swapped(name: str) -> None:
    request = read_request(b'{"model": "m",  "x": 1}')
    assert FORMATS[name].rewrite(request, "m", want_ids=False) is request
    stream = sse(*STREAMS[name])
    assert forwarded(name, "m", [stream]).seen == stream
    parser = FORMATS[name].reply_parser(request, "m", streamed=True)
    assert parser.feed(stream) == sse(*STREAMS[name][:-1])
    assert parser.finish() == sse(STREAMS[name][-1])
    assert not forwarded(name, "m", [sse(*STREAMS[name][:-1])]).ended


@pytest.mark.parametrize("name", STREAMS)
@given(cuts=st.lists(st.integers(0, 2000), max_size=10))
def test_clients_model_name_is_put_back_however_the_stream_is_cut(
    name: str, cuts: list[int]
) -> None:
    reply = forwarded(name, "m@2", cut(sse(*STREAMS[name]), cuts))
    assert b"m@2" not in reply.seen
    assert (reply.ended, reply.facts.sampled.prompt_ids) == (True, None)


def test_stream_of_the_messages_api_is_recorded_as_one_message() -> None:
    facts = forwarded("messages", None, [sse(*MESSAGE_EVENTS)]).facts
    message = json.loads(facts.reply or b"")
    assert message["content"][0] == {"type": "text", "text": "h\u00e9"}
    assert message["content"][1]["input"] == {"a": 1}
    assert message["usage"] == {"in": 1, "out": 5}
    assert (facts.response_id, facts.finish) == ("msg_1", "tool_use")
    [made] = facts.tool_calls
    assert (made.id, made.name, made.arguments) == ("t1", "calc", '{"a":1}')


def test_stream_of_the_responses_api_is_recorded_as_its_final_response() -> None:
    facts = forwarded("responses", None, [sse(*RESPONSE_EVENTS)]).facts
    assert json.loads(facts.reply or b"") == RESPONSE
    assert (facts.finish, facts.tool_calls[0].id) == ("completed", "c1")


@pytest.mark.parametrize("content", [7, "text", [7], [None], {"0": {}}])
def test_malformed_event_does_not_stop_a_message_stream(content: Any) -> None:
    odd = {"type": "message_delta", "delta": {"content": content}}
    stream = sse(MESSAGE_EVENTS[0], odd, *MESSAGE_EVENTS[1:])
    assert forwarded("messages", None, [stream]).seen == stream


def test_clients_model_name_is_put_back_in_a_message_that_is_not_streamed() -> None:
    request = MESSAGES.rewrite(read_request(b'{"model":"m","z":1e400}'), "m@2", want_ids=False)
    assert request.body == b'{"model":"m@2","z":1e400}'
    reply = follow("messages", request, [json.dumps(MESSAGE).encode()], "m@2", streamed=False)
    assert json.loads(reply.seen)["model"] == "m"
    assert reply.facts.response_id == "msg_1"
