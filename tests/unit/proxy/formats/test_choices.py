"""The chat wire_format: what is added is taken out again, whatever way the stream is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import read_request
from proxy.formats.chat import CHAT
from proxy.formats.choices import StreamedReply, StreamReader, WholeReader, WholeReply
from proxy.formats.completions import COMPLETIONS

ASKED = (
    b'{"model":"agent","messages":[{"role":"user","content":"h\xc3\xa9"}],'
    b'"x":1e400,"seed":12345678901234567890}'
)


def asked(body: bytes = ASKED, **fields: Any) -> Any:
    if fields:
        body = json.dumps(json.loads(b'{"model":"agent"}') | fields).encode()
    return CHAT.rewrite(read_request(body), "agent@3", want_ids=True)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def chunk(delta: Any, ids: Any = None, logprobs: Any = None, **more: Any) -> dict[str, Any]:
    content = (
        None if logprobs is None else {"content": [{"token": "t", "logprob": p} for p in logprobs]}
    )
    choice = {"index": 0, "delta": delta, "logprobs": content, "finish_reason": None}
    return {"id": "r1", "model": "agent@3", "choices": [choice | {"token_ids": ids} | more]}


HEAD = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2, 3]}
STREAM = (
    b"\n\n".join(
        [
            event(HEAD),
            event(chunk({"content": "h\u00e9"}, [4], [-0.5])),
            event(chunk({}, [5], [-1.5])),
            b": a comment",
            event(chunk({"content": "llo\u2028"}, [6], [-2.5], finish_reason="stop")),
            event(
                {"id": "r1", "model": "agent@3", "choices": [], "usage": {"completion_tokens": 3}}
            ),
            b"data: [DONE]",
        ]
    )
    + b"\n\n"
)
SEEN = (
    b"\n\n".join(
        [
            event(HEAD | {"model": "agent", "prompt_token_ids": None}),
            event(chunk({"content": "h\u00e9"}) | {"model": "agent"}),
            b": a comment",
            event(chunk({"content": "llo\u2028"}, finish_reason="stop") | {"model": "agent"}),
            event({"id": "r1", "model": "agent", "choices": [], "usage": {"completion_tokens": 3}}),
            b"data: [DONE]",
        ]
    )
    + b"\n\n"
)


def run(pieces: list[bytes]) -> tuple[bytes, StreamReader]:
    reply = StreamReader(asked(), "agent@3", "chat.completion")
    out = b"".join(reply.feed(piece) for piece in pieces)
    return out + reply.finish(), reply


def test_the_request_keeps_its_bytes_but_for_what_is_added() -> None:
    body = asked().body
    assert body == ASKED.replace(b'"agent"', b'"agent@3"')[:-1] + (
        b',"logprobs":true,"return_token_ids":true}'
    )


def test_nothing_wanted_nothing_changed() -> None:
    request = read_request(ASKED)
    assert CHAT.rewrite(request, "agent", want_ids=False).body is request.body


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"a":\xff}'])
def test_what_is_no_json_object_goes_through(body: bytes) -> None:
    request = CHAT.rewrite(read_request(body), "agent@3", want_ids=True)
    assert request.body == body
    assert request.parsed is None


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_way_of_cutting_the_stream_gives_the_same(cuts: list[int]) -> None:
    points = [0, *sorted(cuts), len(STREAM)]
    seen, reply = run([STREAM[a:b] for a, b in pairwise(points)])
    assert seen == SEEN
    facts = reply.facts()
    assert facts.whole
    assert facts.sampled.prompt_ids == (1, 2, 3)
    assert facts.sampled.sampled_ids == (4, 5, 6)
    assert facts.sampled.sampled_logprobs == (-0.5, -1.5, -2.5)
    assert facts.finish == "stop"


def test_byte_by_byte_and_with_carriage_returns() -> None:
    stream = STREAM.replace(b"\n", b"\r\n")
    seen, reply = run([stream[i : i + 1] for i in range(len(stream))])
    assert seen == SEEN.replace(b"\n", b"\r\n")
    assert reply.facts().whole


def test_the_end_is_held_back_until_it_is_asked_for() -> None:
    reply = StreamReader(asked(), "agent@3", "chat.completion")
    assert b"[DONE]" not in reply.feed(STREAM)
    assert reply.finish() == b"data: [DONE]\n\n"


def test_chunks_leave_as_soon_as_their_line_is_whole() -> None:
    reply = StreamReader(asked(), "agent@3", "chat.completion")
    assert reply.feed(event(HEAD) + b"\n").startswith(b"data: ")


def test_a_torn_stream_is_not_whole() -> None:
    _, reply = run([STREAM[:200]])
    assert not reply.facts().whole


def test_what_the_client_asked_for_itself_stays() -> None:
    reply = StreamReader(asked(return_token_ids=True, logprobs=True), "agent@3", "chat.completion")
    seen = reply.feed(event(chunk({"content": "x"}, [4], [-0.5])) + b"\n\n")
    assert b'"token_ids":[4]' in seen
    assert b'"logprob":-0.5' in seen


def test_streamed_tool_calls_are_put_together() -> None:
    part = {"index": 0, "id": "call_1", "type": "function"}
    events = [
        chunk(
            {"tool_calls": [part | {"function": {"name": "calc", "arguments": ""}}]}, [1], [-1.0]
        ),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, [2], [-1.0]),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}, [3], [-1.0]),
    ]
    _, reply = run([event(e) + b"\n\n" for e in events] + [b"data: [DONE]\n\n"])
    [call] = reply.facts().tool_calls
    assert (call.id, call.name, call.arguments) == ("call_1", "calc", '{"a":1}')


def test_several_choices_are_counted() -> None:
    second = chunk({"content": "b"}, [9], [-1.0])
    second["choices"][0]["index"] = 1
    _, reply = run([event(chunk({"content": "a"}, [8], [-1.0])) + b"\n\n", event(second) + b"\n\n"])
    assert reply.facts().sampled.choices == 2


WHOLE = {
    "id": "r1",
    "model": "agent@3",
    "unknown": 12345678901234567890,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hé"},
            "logprobs": {"content": [{"token": "t", "logprob": -0.5}]},
            "finish_reason": "length",
            "token_ids": [4],
        }
    ],
    "usage": {"completion_tokens": 1},
    "prompt_token_ids": [1, 2],
}


def test_a_whole_reply_is_restored_and_recorded() -> None:
    reply = WholeReader(asked(), "agent@3")
    assert reply.feed(json.dumps(WHOLE).encode()) == b""
    seen = json.loads(reply.finish())
    choice = WHOLE["choices"][0] | {"logprobs": None, "token_ids": None}  # type: ignore[index]
    assert seen == WHOLE | {"model": "agent", "choices": [choice], "prompt_token_ids": None}
    facts = reply.facts()
    assert facts.sampled.sampled_ids == (4,)
    assert (facts.response_id, facts.finish) == ("r1", "length")


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        b"<html>gateway</html>",
        b'{"error": {"message": "no"}}',
        b'{"choices": [1, 2]}',
        b'{"choices": [{"logprobs": 7, "token_ids": "x"}]}',
        b"",
        b"\xff",
    ],
)
def test_odd_replies_reach_the_client_byte_for_byte(body: bytes, reading: bool) -> None:
    asked = CHAT.rewrite(read_request(b'{"a":1}'), None, want_ids=True)
    reader = WholeReader(asked, None)
    reply = reader if reading else WholeReply(asked, None)
    reply.feed(body)
    out = reply.finish()
    assert out == body or json.loads(out) == json.loads(body)
    reader.facts()


@given(st.binary(max_size=300))
def test_any_bytes_pass_through_a_stream(data: bytes) -> None:
    reply = StreamReader(asked(), "agent@3", "chat.completion")
    out = reply.feed(data) + reply.finish()
    assert out == data or b"data:" in data
    reply.facts()


def test_a_text_completion_is_captured() -> None:
    request = COMPLETIONS.rewrite(read_request(b'{"model":"m","prompt":"x"}'), None, want_ids=True)
    assert b'"logprobs":0,"return_token_ids":true' in request.body
    choice = {
        "index": 0,
        "text": "hi",
        "logprobs": {"token_logprobs": [-0.5, -1.0]},
        "token_ids": [4, 5],
        "prompt_token_ids": [1, 2],
    }
    whole = COMPLETIONS.whole_reader(request, None)
    whole.feed(json.dumps({"id": "c", "choices": [choice]}).encode())
    seen = json.loads(whole.finish())["choices"][0]
    assert (seen["token_ids"], seen["prompt_token_ids"], seen["logprobs"]) == (None, None, None)
    sampled = whole.facts().sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2), (4, 5))
    assert sampled.sampled_logprobs == (-0.5, -1.0)


def test_a_streamed_text_completion_is_put_together() -> None:
    request = COMPLETIONS.rewrite(read_request(b'{"model":"m"}'), None, want_ids=True)
    reply = COMPLETIONS.stream_reader(request, None)
    for text, token in (("h", 4), ("i", 5)):
        choice = {"index": 0, "text": text, "token_ids": [token]}
        reply.feed(event({"id": "c", "choices": [choice]}) + b"\n\n")
    assert reply.feed(b"data: [DONE]\n\n") == b""
    assert reply.finish() == b"data: [DONE]\n\n"
    facts = reply.facts()
    assert facts.whole
    assert json.loads(facts.reply or b"")["choices"][0]["text"] == "hi"
    assert facts.sampled.sampled_ids == (4, 5)


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=8), st.sampled_from([STREAM]))
def test_a_worker_passes_on_what_the_ingester_reads(cuts: list[int], stream: bytes) -> None:
    """Followed for serving alone, a reply leaves as the same bytes, and its summary is the same."""
    followers = [
        StreamedReply(asked(), "agent@3"),
        StreamReader(asked(), "agent@3", "chat.completion"),
    ]
    edges = [0, *sorted(set(cuts)), len(stream)]
    for reply in followers:
        reply.out = b"".join(reply.feed(stream[a:b]) for a, b in pairwise(edges))  # type: ignore[attr-defined]
        reply.out += reply.finish()  # type: ignore[attr-defined]
    serving, reading = followers
    assert serving.out == reading.out  # type: ignore[attr-defined]
    assert serving.summary() == reading.summary()
    assert serving.ended
    assert reading.ended
