"""Chat and text completions: what is added is taken out again, whatever way a stream is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.formats.base import ModelRequest, read_request
from proxy.formats.chat import CHAT
from proxy.formats.completions import COMPLETIONS
from tests.support.recordings import Followed, follow

ASKED = (
    b'{"model":"agent","messages":[{"role":"user","content":"h\xc3\xa9"}],'
    b'"x":1e400,"seed":12345678901234567890}'
)
SERVED = "agent@3"


def asked(body: bytes = ASKED, **fields: Any) -> ModelRequest:
    if fields:
        body = json.dumps({"model": "agent"} | fields).encode()
    return CHAT.rewrite(read_request(body), SERVED, want_ids=True)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def chunk(delta: Any, ids: Any = None, logprobs: Any = None, **more: Any) -> dict[str, Any]:
    content = (
        None if logprobs is None else {"content": [{"token": "t", "logprob": p} for p in logprobs]}
    )
    choice = {"index": 0, "delta": delta, "logprobs": content, "finish_reason": None}
    return {"id": "r1", "model": SERVED, "choices": [choice | {"token_ids": ids} | more]}


def joined(*lines: bytes) -> bytes:
    return b"\n\n".join([*lines, b"data: [DONE]", b""])


HEAD = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2, 3]}
USAGE = {"id": "r1", "model": SERVED, "choices": [], "usage": {"completion_tokens": 3}}
STREAM = joined(
    event(HEAD),
    event(chunk({"content": "h\u00e9"}, [4], [-0.5])),
    event(chunk({}, [5], [-1.5])),
    b": a comment",
    event(chunk({"content": "llo\u2028"}, [6], [-2.5], finish_reason="stop")),
    event(USAGE),
)
SEEN = joined(
    event(HEAD | {"model": "agent", "prompt_token_ids": None}),
    event(chunk({"content": "h\u00e9"}) | {"model": "agent"}),
    b": a comment",
    event(chunk({"content": "llo\u2028"}, finish_reason="stop") | {"model": "agent"}),
    event(USAGE | {"model": "agent"}),
)


def run(*pieces: bytes, request: ModelRequest | None = None) -> Followed:
    return follow("chat", request or asked(), pieces, SERVED, streamed=True)


def test_request_keeps_its_bytes_but_for_what_is_added() -> None:
    body = asked().body
    assert body == ASKED.replace(b'"agent"', b'"agent@3"')[:-1] + (
        b',"logprobs":true,"return_token_ids":true}'
    )
    request = read_request(ASKED)
    assert CHAT.rewrite(request, "agent", want_ids=False).body is request.body


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"a":\xff}'])
def test_request_that_is_no_json_object_is_not_changed(body: bytes) -> None:
    request = CHAT.rewrite(read_request(body), SERVED, want_ids=True)
    assert request.body == body
    assert request.parsed is None


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
@example(list(range(len(STREAM))))
def test_any_way_of_cutting_a_stream_gives_the_same(cuts: list[int]) -> None:
    points = [0, *sorted(cuts), len(STREAM)]
    reply = run(*(STREAM[a:b] for a, b in pairwise(points)))
    assert (reply.seen, reply.ended, reply.facts.finish) == (SEEN, True, "stop")
    sampled = reply.facts.sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2, 3), (4, 5, 6))
    assert sampled.sampled_logprobs == (-0.5, -1.5, -2.5)
    assert json.loads(reply.facts.reply or b"") == {
        "id": "r1",
        "model": "agent",
        "prompt_token_ids": None,
        "usage": {"completion_tokens": 3},
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "h\u00e9llo\u2028"},
                "logprobs": None,
                "finish_reason": "stop",
                "token_ids": None,
            }
        ],
    }
    assert (reply.summary.response_id, reply.summary.text) == ("r1", "h\u00e9llo\u2028")


def test_line_leaves_when_it_is_whole_and_the_end_is_held_back() -> None:
    parser = CHAT.reply(asked(), SERVED, streamed=True)
    assert parser.feed(event(HEAD)) == b""
    assert parser.feed(b"\n").startswith(b"data: ")
    assert b"[DONE]" not in parser.feed(STREAM)
    assert parser.at_end
    assert parser.finish() == b"data: [DONE]\n\n"


def test_comment_after_the_end_leaves_after_it() -> None:
    more = b": a comment\n\n"
    assert run(STREAM + more).seen == SEEN + more


def test_torn_stream_has_not_ended() -> None:
    assert not run(STREAM[:200]).ended


def test_stream_has_ended_with_each_choices_reason_or_with_done() -> None:
    assert run(event(chunk({"content": "a"}, finish_reason="stop")) + b"\n\n").ended
    second = chunk({"content": "b"}, index=1)
    stopped = event(chunk({"content": "a"}, finish_reason="stop")) + b"\n\n"
    assert not run(stopped + event(second) + b"\n\n").ended


def test_choice_whose_index_is_no_number_does_not_stop_the_ingester() -> None:
    odd = event(chunk({"content": "b"}, [7], [-1.0])).replace(b'"index":0', b'"index":1e400')
    reply = run(odd + b"\n\n" + STREAM)
    assert (reply.facts.text, reply.facts.sampled.sampled_ids) == ("h\u00e9llo\u2028", None)


def test_what_the_client_asked_for_itself_stays() -> None:
    request = asked(return_token_ids=True, logprobs=True)
    reply = run(event(chunk({"content": "x"}, [4], [-0.5])) + b"\n\n", request=request)
    assert b'"token_ids":[4]' in reply.seen
    assert b'"logprob":-0.5' in reply.seen
    assert reply.facts.sampled.sampled_ids == (4,)


def test_streamed_tool_calls_are_put_together() -> None:
    named = {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": ""}}
    pieces = [named, {"function": {"arguments": '{"a"'}}, {"function": {"arguments": ":1}"}}]
    events = [chunk({"tool_calls": [{"index": 0} | piece]}, [1], [-1.0]) for piece in pieces]
    reply = run(*(event(e) + b"\n\n" for e in events), b"data: [DONE]\n\n")
    for calls in (reply.facts.tool_calls, reply.summary.tool_calls):
        [call] = calls
        assert (call.id, call.name, call.arguments) == ("call_1", "calc", '{"a":1}')


def test_several_choices_are_counted() -> None:
    second = chunk({"content": "b"}, [9], [-1.0], index=1)
    reply = run(event(chunk({"content": "a"}, [8], [-1.0])) + b"\n\n", event(second) + b"\n\n")
    assert (reply.facts.sampled.choices, reply.facts.text) == (2, "a")


WHOLE: dict[str, Any] = {
    "id": "r1",
    "model": SERVED,
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


def test_whole_reply_is_restored_and_recorded() -> None:
    reply = follow("chat", asked(), [json.dumps(WHOLE).encode()], SERVED)
    choice = WHOLE["choices"][0] | {"logprobs": None, "token_ids": None}
    restored = WHOLE | {"model": "agent", "choices": [choice], "prompt_token_ids": None}
    assert json.loads(reply.seen) == json.loads(reply.facts.reply or b"") == restored
    assert reply.facts.sampled.sampled_ids == (4,)
    assert (reply.facts.response_id, reply.facts.finish, reply.facts.text) == ("r1", "length", "hé")
    assert reply.summary.text == "hé"


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
def test_odd_whole_reply_reaches_the_client_byte_for_byte(body: bytes) -> None:
    request = CHAT.rewrite(read_request(b'{"a":1}'), None, want_ids=True)
    assert follow("chat", request, [body], None).seen == body


def test_text_completion_is_restored_and_recorded() -> None:
    request = COMPLETIONS.rewrite(read_request(b'{"model":"m","prompt":"x"}'), None, want_ids=True)
    assert b'"logprobs":0,"return_token_ids":true' in request.body
    ids = {"token_ids": [4, 5], "prompt_token_ids": [1, 2]}
    choice = {"index": 0, "text": "hi", "logprobs": {"token_logprobs": [-0.5, -1.0]}} | ids
    reply = follow(
        "completions", request, [json.dumps({"id": "c", "choices": [choice]}).encode()], None
    )
    [seen] = json.loads(reply.seen)["choices"]
    assert (seen["token_ids"], seen["prompt_token_ids"], seen["logprobs"]) == (None, None, None)
    sampled = reply.facts.sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2), (4, 5))
    assert sampled.sampled_logprobs == (-0.5, -1.0)


def test_streamed_text_completion_is_put_together() -> None:
    request = COMPLETIONS.rewrite(read_request(b'{"model":"m"}'), None, want_ids=True)
    choices = [{"index": 0, "text": text, "token_ids": [i]} for text, i in (("h", 4), ("i", 5))]
    pieces = [event({"id": "c", "choices": [choice]}) + b"\n\n" for choice in choices]
    reply = follow("completions", request, [*pieces, b"data: [DONE]\n\n"], None, streamed=True)
    assert reply.seen.endswith(b"data: [DONE]\n\n")
    assert (reply.ended, reply.facts.text, reply.facts.sampled.sampled_ids) == (True, "hi", (4, 5))
    assert json.loads(reply.facts.reply or b"")["object"] == "text_completion"
