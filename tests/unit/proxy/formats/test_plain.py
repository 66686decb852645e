"""Where ids are not wanted: untouched but for the name, and put together for the ledger."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import WireFormat, read_request
from proxy.formats.messages import MESSAGES
from proxy.formats.responses import RESPONSES


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events
    )


MESSAGE = {"id": "msg_1", "model": "m@2", "role": "assistant", "content": [], "usage": {"in": 1}}
MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": MESSAGE},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "h\u00e9"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "t1", "name": "calc", "input": {}},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": '{"a"'},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": ": 1}"},
    },
    {"type": "content_block_stop", "index": 1},
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
STREAMS: dict[str, tuple[WireFormat, list[dict[str, Any]]]] = {
    "messages": (MESSAGES, MESSAGE_EVENTS),
    "responses": (RESPONSES, RESPONSE_EVENTS),
}


def follow(wire_format: WireFormat, served: str | None, pieces: list[bytes]) -> tuple[bytes, Any]:
    request = wire_format.rewrite(read_request(b'{"model":"m"}'), served, want_ids=False)
    reply = wire_format.stream_reader(request, served)
    out = b"".join(reply.feed(piece) for piece in pieces)
    return out + reply.finish(), reply.facts()


@pytest.mark.parametrize("name", STREAMS)
def test_without_a_swap_every_byte_is_the_upstreams(name: str) -> None:
    wire_format, events = STREAMS[name]
    request = read_request(b'{"model": "m",  "x": 1}')
    assert wire_format.rewrite(request, "m", want_ids=False) is request
    stream = sse(*events)
    assert follow(wire_format, "m", [stream])[0] == stream


@pytest.mark.parametrize("name", STREAMS)
@given(cuts=st.lists(st.integers(0, 2000), max_size=10))
def test_the_name_is_put_back_however_the_stream_is_cut(name: str, cuts: list[int]) -> None:
    wire_format, events = STREAMS[name]
    stream = sse(*events)
    points = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    seen, facts = follow(wire_format, "m@2", [stream[a:b] for a, b in pairwise(points)])
    assert b"m@2" not in seen
    assert facts.whole
    assert facts.sampled.prompt_ids is None


def test_a_streamed_message_is_put_together() -> None:
    _, facts = follow(MESSAGES, None, [sse(*MESSAGE_EVENTS)])
    reply = json.loads(facts.reply)
    assert reply["content"][0] == {"type": "text", "text": "h\u00e9"}
    assert reply["content"][1]["input"] == {"a": 1}
    assert reply["usage"] == {"in": 1, "out": 5}
    assert (facts.response_id, facts.finish) == ("msg_1", "tool_use")
    [call] = facts.tool_calls
    assert (call.id, call.name, call.arguments) == ("t1", "calc", '{"a":1}')


def test_a_streamed_response_is_its_last_state() -> None:
    _, facts = follow(RESPONSES, None, [sse(*RESPONSE_EVENTS)])
    assert json.loads(facts.reply) == RESPONSE
    assert facts.finish == "completed"
    assert facts.tool_calls[0].id == "c1"


@pytest.mark.parametrize("name", STREAMS)
def test_the_last_event_is_held_back(name: str) -> None:
    wire_format, events = STREAMS[name]
    reply = wire_format.streamed(read_request(b'{"model":"m"}'), None)
    assert reply.feed(sse(*events)) == sse(*events[:-1])
    assert reply.finish() == sse(events[-1])


@pytest.mark.parametrize("name", STREAMS)
def test_a_torn_stream_is_not_whole(name: str) -> None:
    wire_format, events = STREAMS[name]
    _, facts = follow(wire_format, None, [sse(*events[:-1])])
    assert not facts.whole


def test_a_whole_reply_gets_its_name_back() -> None:
    request = MESSAGES.rewrite(read_request(b'{"model":"m","z":1e400}'), "m@2", want_ids=False)
    assert request.body == b'{"model":"m@2","z":1e400}'
    reply = MESSAGES.whole_reader(request, "m@2")
    reply.feed(json.dumps(MESSAGE).encode())
    assert json.loads(reply.finish())["model"] == "m"
    assert reply.facts().response_id == "msg_1"


@pytest.mark.parametrize("body", [b"<html>", b"", b"[1]", b'{"error": {"type": "x"}}', b"\xff"])
def test_odd_replies_pass_byte_for_byte(body: bytes) -> None:
    reply = RESPONSES.whole_reader(read_request(b'{"model":"m"}'), "m@2")
    reply.feed(body)
    assert reply.finish() == body
    reply.facts()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = ("message", "response", "index", "delta", "content_block", "usage")


@given(
    st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from([e["type"] for e in MESSAGE_EVENTS + RESPONSE_EVENTS])},
            optional=dict.fromkeys(FIELDS, JSON),
        ),
        max_size=5,
    )
)
def test_no_shape_of_an_event_breaks_the_call(events: list[dict[str, Any]]) -> None:
    for wire_format, _ in STREAMS.values():
        stream = sse(*events)
        assert follow(wire_format, None, [stream])[0] == stream
