"""Chat and text completions: what is added is taken out again, whatever way a stream is cut."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.formats.base import ModelRequest, read_request
from proxy.formats.chat import CHAT
from tests.support.recordings import DONE, VERSION, Followed, chunk, cut, follow, rewritten, sse

ASKED = (
    b'{"model":"agent","messages":[{"role":"user","content":"h\xc3\xa9"}],'
    b'"x":1e400,"seed":12345678901234567890}'
)
REQUEST = CHAT.rewrite(read_request(ASKED), VERSION, want_ids=True)
NULLS: dict[str, Any] = {"logprobs": None, "token_ids": None}
HEAD = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2, 3]}
USAGE = {"id": "r1", "model": VERSION, "choices": [], "usage": {"completion_tokens": 3}}
COMMENT = b": a comment\n\n"
STREAM = b"".join(
    [
        sse(HEAD, chunk({"content": "h\u00e9"}, {4: -0.5}), chunk({}, {5: -1.5})),
        COMMENT,
        sse(chunk({"content": "llo\u2028"}, {6: -2.5}, finish_reason="stop"), USAGE),
        DONE,
    ]
)
SEEN = b"".join(
    [
        sse(HEAD | {"prompt_token_ids": None}, chunk({"content": "h\u00e9"}, **NULLS)),
        COMMENT,
        sse(chunk({"content": "llo\u2028"}, finish_reason="stop", **NULLS), USAGE),
        DONE,
    ]
).replace(b"agent@3", b"agent")


def run(*pieces: bytes, request: ModelRequest = REQUEST) -> Followed:
    return follow("chat", request, pieces, VERSION, streamed=True)


def test_rewritten_request_keeps_its_bytes_except_model_name_and_added_fields() -> None:
    assert REQUEST.body == ASKED.replace(b'"agent"', b'"agent@3"')[:-1] + (
        b',"logprobs":true,"return_token_ids":true}'
    )
    request = read_request(ASKED)
    assert CHAT.rewrite(request, "agent", want_ids=False).body is request.body


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"a":\xff}'])
def test_request_that_is_no_json_object_is_not_changed(body: bytes) -> None:
    request = CHAT.rewrite(read_request(body), VERSION, want_ids=True)
    assert request.body == body
    assert request.parsed is None


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
@example(list(range(len(STREAM))))
def test_chat_stream_is_read_the_same_however_its_bytes_are_cut(cuts: list[int]) -> None:
    reply = run(*cut(STREAM, cuts))
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


def test_stream_line_is_passed_on_once_complete_and_the_final_event_is_held_back() -> None:
    parser = CHAT.reply_parser(REQUEST, VERSION, streamed=True)
    assert parser.feed(sse(HEAD)[:-2]) == b""
    assert parser.feed(b"\n").startswith(b"data: ")
    assert b"[DONE]" not in parser.feed(STREAM)
    assert parser.at_end
    assert parser.finish() == DONE


def test_stream_comment_after_the_final_event_is_sent_after_it() -> None:
    assert run(STREAM + COMMENT).seen == SEEN + COMMENT


def test_torn_stream_has_not_ended() -> None:
    assert not run(STREAM[:200]).ended


def test_stream_has_ended_only_with_a_finish_reason_for_every_choice() -> None:
    stopped = chunk({"content": "a"}, finish_reason="stop")
    assert run(sse(stopped)).ended
    assert not run(sse(stopped, chunk({"content": "b"}, index=1))).ended


def test_choice_with_an_invalid_index_does_not_stop_the_ingester() -> None:
    odd = sse(chunk({"content": "b"}, {7: -1.0})).replace(b'"index":0', b'"index":1e400')
    reply = run(odd + STREAM)
    assert (reply.facts.text, reply.facts.sampled.sampled_ids) == ("h\u00e9llo\u2028", None)


def test_token_ids_and_logprobs_that_the_chat_client_requested_reach_it() -> None:
    request = rewritten("chat", return_token_ids=True, logprobs=True)
    reply = run(sse(chunk({"content": "x"}, {4: -0.5})), request=request)
    assert b'"token_ids":[4]' in reply.seen
    assert b'"logprob":-0.5' in reply.seen
    assert reply.facts.sampled.sampled_ids == (4,)


def test_streamed_tool_calls_are_put_together() -> None:
    named: dict[str, Any] = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "calc", "arguments": ""},
    }
    more = ({"function": {"arguments": said}} for said in ('{"a"', ":1}"))
    events = [chunk({"tool_calls": [{"index": 0} | piece]}, {1: -1.0}) for piece in (named, *more)]
    reply = run(sse(*events), DONE)
    for calls in (reply.facts.tool_calls, reply.summary.tool_calls):
        [call] = calls
        assert (call.id, call.name, call.arguments) == ("call_1", "calc", '{"a":1}')


def test_choices_of_a_reply_are_counted_and_the_text_of_the_first_is_recorded() -> None:
    first = chunk({"content": "a"}, {8: -1.0})
    reply = run(sse(first, chunk({"content": "b"}, {9: -1.0}, index=1)))
    assert (reply.facts.sampled.choices, reply.facts.text) == (2, "a")


WHOLE: dict[str, Any] = {
    "id": "r1",
    "model": VERSION,
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


def test_unstreamed_chat_reply_loses_the_added_fields_and_is_recorded() -> None:
    reply = follow("chat", REQUEST, [json.dumps(WHOLE).encode()], VERSION)
    choice = WHOLE["choices"][0] | NULLS
    restored = WHOLE | {"model": "agent", "choices": [choice], "prompt_token_ids": None}
    assert json.loads(reply.seen) == json.loads(reply.facts.reply or b"") == restored
    assert reply.facts.sampled.sampled_ids == (4,)
    assert (reply.facts.response_id, reply.facts.finish, reply.facts.text) == ("r1", "length", "hé")
    assert reply.summary.text == "hé"


def test_text_completion_loses_the_added_fields_and_is_recorded() -> None:
    request = rewritten("completions")
    assert b'"logprobs":0,"return_token_ids":true' in request.body
    ids = {"token_ids": [4, 5], "prompt_token_ids": [1, 2]}
    choice = {"index": 0, "text": "hi", "logprobs": {"token_logprobs": [-0.5, -1.0]}} | ids
    body = json.dumps({"id": "c", "choices": [choice]}).encode()
    reply = follow("completions", request, [body], VERSION)
    [seen] = json.loads(reply.seen)["choices"]
    assert (seen["token_ids"], seen["prompt_token_ids"], seen["logprobs"]) == (None, None, None)
    sampled = reply.facts.sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2), (4, 5))
    assert sampled.sampled_logprobs == (-0.5, -1.0)


def test_streamed_text_completion_is_put_together() -> None:
    choices = [{"index": 0, "text": text, "token_ids": [i]} for text, i in (("h", 4), ("i", 5))]
    stream = sse(*({"id": "c", "choices": [choice]} for choice in choices)) + DONE
    reply = follow("completions", rewritten("completions"), [stream], VERSION, streamed=True)
    assert reply.seen.endswith(DONE)
    assert (reply.ended, reply.facts.text, reply.facts.sampled.sampled_ids) == (True, "hi", (4, 5))
    assert json.loads(reply.facts.reply or b"")["object"] == "text_completion"
