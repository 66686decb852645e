"""Replies that no parser reads, or that stand on several lines: what was added still goes out."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import read_request
from proxy.formats.registry import FORMATS
from tests.support.recordings import DONE, PLAIN, VERSION, cut, follow, rewritten, sse

ID = b"987654321"


def whole(api: str, body: bytes, **fields: Any) -> bytes:
    return follow(api, rewritten(api, **fields), [body], VERSION, streamed=False).seen


def streamed(api: str, pieces: Iterable[bytes], **fields: Any) -> bytes:
    return follow(api, rewritten(api, **fields), pieces, VERSION, streamed=True).seen


TAKEN = b'"logprobs":{"content":[{"token":"]}","logprob":-0.5}]},"token_ids":[%b]' % ID
LEFT = b'"logprobs":null,"token_ids":null'
# Each has a place (X) for what was added; all else stays as it is.
ODD = {
    "half an emoji": b'{"choices":[{"index":0,"message":{"content":"\\ud83d"},X}]}',
    "a huge number": b'{"choices":[{"index":0,"message":{"content":"a"},"n":1E400,X}],"x":-1E400}',
    "no number": b'{"choices":[{"index":0,"x":NaN,X,"y":[-Infinity]}]}',
    "no text": b'{"choices":[{"index":0,"message":{"content":"\xff\xfe"},X}]}',
    "a control character": b'{"choices":[{"index":0,"message":{"content":"\x01"},X}]}',
    "a mark before it": b'\xef\xbb\xbf{"choices":[{"index":0,X}]}',
    "more after it": b'{"choices":[{"index":0,X}]} and more',
    "an unknown escape": b'{"choices":[{"index":0,"message":{"content":"\\x"},X}]}',
    "an odd choice": b'{"choices":[7,{"index":0,X}]}',
    "a choice too many brackets deep": b'{"choices":[[{"index":0,X}]]}',
    "choices by name": b'{"choices":{"0":{X}}}',
    "cut off": b'{"choices":[{"index":0,X,"message":{"content":"abc',
    "cut off at an escape": b'{"choices":[{"index":0,X,"message":{"content":"abc\\',
    "a bracket too many": b'{"choices":[{"index":0,X}]}}',
    "a list": b'[{"choices":[{"index":0,X}]}]',
    "names in texts": b'{"choices":[{"message":{"content":"\\"token_ids\\":[1]"},"y":NaN,X}]}',
}


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("name", ODD)
def test_odd_reply_loses_only_the_fields_that_the_proxy_asked_for(name: str, api: str) -> None:
    body, wanted = ODD[name].replace(b"X", TAKEN), ODD[name].replace(b"X", LEFT)
    assert whole(api, body) == wanted
    event = b"data: %b\n\n"
    assert streamed(api, [event % body]) == event % wanted
    # Who asks for it has it.
    asked = {"logprobs": True if api == "chat" else 1, "return_token_ids": True}
    body = ODD[name].replace(b"X", TAKEN)
    assert whole(api, body, **asked) == body
    assert streamed(api, [event % body], **asked) == event % body


# An error of a chat's is made one of Anthropic's.
NO_REPLIES = [b"<html>502</html>", b"", b"\xff", b"[1]", b'{"a": 1}', b'{"choices": [7]}']
NO_REPLIES += [b'{"choices": [{"logprobs": 7, "token_ids": "x"}]}']
ERROR = b'{"error":  {"message": "no"}}'


@pytest.mark.parametrize("api", PLAIN)
@pytest.mark.parametrize("want_ids", [False, True])
def test_body_that_is_no_reply_reaches_the_client_unchanged(api: str, want_ids: bool) -> None:
    request = rewritten(api, want_ids=want_ids)
    for body in NO_REPLIES + [ERROR] * (request.path is None):
        assert follow(api, request, [body], VERSION, streamed=False).seen == body


UNHOLDABLE = (
    b'{"choices":[{"index":0,"delta":{"content":"\\ud83d"},"token_ids":[1],"logprobs":null}]}',
    b'{"choices":[{"index":0,"delta":{},"finish_reason":"\\ud83d"}],"x":1e400}',
    b'{"type":"message_start","message":{"model":"m@1","id":"\\udc00"},"usage":1e999}',
    b'{"id":"r","model":"m@1","usage":{"x":1e400},"content":[{"type":"text","text":"\\ud800"}]}',
)


@pytest.mark.parametrize("body", UNHOLDABLE)
@pytest.mark.parametrize("api", PLAIN)
def test_values_that_python_cannot_hold_reach_the_client(api: str, body: bytes) -> None:
    """Halves of an emoji in a stream, numbers past any float: for the client, not for us."""
    spoken = FORMATS[api]
    request = spoken.rewrite(read_request(b'{"model":"m"}'), "m@1", want_ids=True)
    for streamed, reply in ((False, body), (True, b"data: " + body + b"\n\n")):
        seen = follow(api, request, [reply], "m@1", streamed=streamed).seen
        assert all(part in seen for part in re.findall(rb"1e\d+|\\\\ud[0-9a-f]+", body))


def test_added_field_of_an_unexpected_type_is_left_in() -> None:
    body = b'{"choices":[{"token_ids":7,"logprobs":[1]}],"prompt_token_ids":"x","y":NaN}'
    assert whole("chat", body) == body
    read = body.replace(b"NaN", b"1")
    assert whole("chat", read) == read


def test_odd_reply_shows_the_clients_model_name_and_not_the_versions() -> None:
    body = b'{"model": "agent@3", "x": NaN, "y": {"model": "agent@3"}}'
    wanted = body.replace(b"agent@3", b"agent")
    assert whole("chat", body) == wanted
    assert whole("responses", body) == wanted
    other = body.replace(b"agent@3", b"agent@31")
    assert whole("chat", other) == other
    forwarded = rewritten("messages", want_ids=False)
    assert follow("messages", forwarded, [body], VERSION).seen == wanted


RESPONSE = (
    b'{"id":"r","model":"agent@3","top_logprobs":0,"output":[{"type":"message","content":[{"type":'
    b'"output_text","text":"\\ud83d","logprobs":[{"token":"a","logprob":-1,"top_logprobs":[]}]}]}],'
    b'"input_messages":[{"type":"raw_message_tokens","tokens":[%b]}],"output_messages":[[%b]]}'
) % (ID, ID)


def test_odd_response_loses_the_added_fields() -> None:
    assert whole("responses", RESPONSE) == (
        b'{"id":"r","model":"agent","top_logprobs":null,"output":[{"type":"message","content":'
        b'[{"type":"output_text","text":"\\ud83d","logprobs":null}]}],'
        b'"input_messages":null,"output_messages":null}'
    )
    event = b'event: response.completed\ndata: {"type":"response.completed","response":%b}\n\n'
    assert ID not in streamed("responses", [event % RESPONSE])
    odd = RESPONSE.replace(b'"output":[{', b'"output":[7,{').replace(b"\\ud83d", b"x")
    assert ID not in whole("responses", odd)
    assert ID not in streamed("responses", [event % odd])


def test_odd_chat_reply_is_translated_to_a_message() -> None:
    """Half an emoji is what decoders make of it, U+FFFD; ids go, whatever else comes."""
    body = (
        b'{"id":"c","model":"agent@3","choices":[{"index":0,"finish_reason":"stop",%b,'
        b'"message":{"role":"assistant","content":"a\\ud83d \\ud83d\\ude00 \\\\ud83d"}}]}'
    ) % TAKEN
    message = json.loads(whole("messages", body))
    assert message["content"] == [{"type": "text", "text": "a\ufffd \U0001f600 \\ud83d"}]
    assert message["model"] == "agent"
    assert ID not in whole("messages", body.replace(b"choices", b"chances"))
    assert ID not in whole("messages", body[:-30])


WHOLE = (
    b'{"id":"r1","model":"agent@3","choices":[{"index":0,"message":{"role":"assistant","content":'
    b'"h","tool_calls":[{"id":"t","function":{"arguments":"{\\"token_ids\\":[7]}"}}]},X,'
    b'"finish_reason":"stop"}],"usage":{"completion_tokens":1},"prompt_token_ids":[1,%b]}' % ID
)


@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE)), st.binary(max_size=3)), max_size=4),
    st.integers(0, 2 * len(WHOLE)),
)
def test_damaged_reply_never_shows_a_token_id_that_the_proxy_asked_for(
    damage: list[tuple[int, bytes]], cut: int
) -> None:
    """Bytes put in anywhere but into what was added itself, and the end cut off anywhere."""
    body = WHOLE
    for at, more in damage:
        if at <= body.find(b'"prompt_token_ids"'):
            body = body[:at] + more.replace(b"X", b"x") + body[at:]
    body = body.replace(b"X", TAKEN)[: cut or None]
    assert ID not in whole("chat", body)
    lines = [b"data: " + line + b"\n" for line in body.split(b"\n")]
    assert ID not in streamed("chat", [*lines, b"\n"])


def test_event_on_several_lines_is_read_as_a_single_event() -> None:
    body = ODD["a huge number"].replace(b"X", b"\nX")
    lines = b"event: e\n" + b"".join(
        b"data: " + line + b"\n" for line in body.replace(b"X", TAKEN).split(b"\n")
    )
    wanted = lines.replace(TAKEN, LEFT)
    assert streamed("chat", [lines + b"id: 7\n\n"]).replace(b"\ndata: ", b"") == (
        (wanted + b"id: 7\n\n").replace(b"\ndata: ", b"")
    )
    event = b'data: {"id":"c","choices":[{"index":0,\ndata: "delta":{"content":"h"},X}\ndata\n'
    event += b"data:]}\n\ndata: [DONE]\n\n"
    reply = follow("chat", rewritten("chat"), [event.replace(b"X", TAKEN)], VERSION, streamed=True)
    assert reply.seen == (
        b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"h"},'
        + LEFT
        + b"}]}\n\ndata: [DONE]\n\n"
    )
    assert reply.ended
    assert reply.facts.sampled.sampled_ids == (int(ID),)
    assert json.loads(reply.facts.reply or b"")["choices"][0]["message"] == {"content": "h"}


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_stream_event_of_an_unknown_kind_is_passed_on_unchanged(api: str) -> None:
    stream = (
        b"data: one\ndata:two\n: c\nid: 7\n\ndata\n\ndata:\n\nretry: 1\n\ndata: [1,\ndata: 2]\n\n"
    )
    for end in (b"\n", b"\r\n", b"\r"):
        data = stream.replace(b"\n", end)
        assert streamed(api, [data]) == data
        assert streamed(api, [data[i : i + 1] for i in range(len(data))]) == data


CHUNK = b'{"id":"c","model":"agent@3","choices":[{"index":0,"delta":{"content":"h"},X}]}'
SENT = b"\xef\xbb\xbfdata: C\n\nid: 1\ndata:C\nevent: e\n\ndata: C".replace(b"C", CHUNK)


@given(st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, len(SENT)), max_size=6))
def test_stream_loses_the_added_fields_with_any_line_end_and_any_cut(
    end: bytes, cuts: list[int]
) -> None:
    data = SENT.replace(b"\n", end).replace(b"X", TAKEN)
    wanted = SENT.replace(b"\n", end).replace(b"X", LEFT).replace(b"agent@3", b"agent")
    assert streamed("chat", cut(data, cuts)) == wanted


def test_truncated_line_is_sent_without_its_token_ids() -> None:
    data = b'data: {"choices":[{"index":0,"token_ids":[1,' + ID
    assert streamed("chat", [data]) == b'data: {"choices":[{"index":0,"token_ids":null'


def test_chat_chunk_on_several_data_lines_is_translated_to_a_message() -> None:
    head = b'data: {"id":"c","choices":[{"index":0,\ndata: "delta":{"role":"assistant"}}]}\n\n'
    said = b'data: {"id":"c","choices":[{"index":0,\rdata: "delta":{"content":"h"},X}]}\r\r'
    seen = streamed("messages", [head, said.replace(b"X", TAKEN), DONE])
    assert b'"text":"h"' in seen
    assert seen.endswith(b'data: {"type":"message_stop"}\n\n')


def vllm_stream(asked: dict[str, bool], *, parser_hides: bool, usage: bool) -> Iterator[bytes]:
    """Four tokens, two of which vLLM's tool parser keeps (`chat_completion/serving.py`)."""
    for number, delta in enumerate(({"content": "a"}, None, None, {"tool_calls": [{"index": 0}]})):
        ids = asked["return_token_ids"] and not parser_hides
        entry = {"token": "t", "logprob": -1.0, "bytes": [116], "top_logprobs": []}
        logprobs = {"content": [entry]} if asked["logprobs"] and not parser_hides else None
        if delta is None and logprobs is None and not ids:
            continue
        choice = {"index": 0, "delta": delta or {}, "logprobs": logprobs, "finish_reason": None}
        event: dict[str, Any] = {"id": "c", "model": VERSION}
        event |= {"choices": [choice | {"token_ids": [number] if ids else None}]}
        yield sse(event | ({"usage": {"completion_tokens": number + 1}} if usage else {}))
    # A parser's own empty delta is sent to everybody.
    yield b'data: {"choices":[{"index":0,"delta":{},"logprobs":null,"token_ids":null}]}\n\n'
    yield DONE


@pytest.mark.parametrize(
    ("logprobs", "ids", "hides", "usage"), list(product([False, True], repeat=4))
)
def test_client_sees_the_same_chunks_as_without_added_fields(
    logprobs: bool, ids: bool, hides: bool, usage: bool
) -> None:
    asked = {"logprobs": logprobs, "return_token_ids": ids}
    direct = b"".join(vllm_stream(asked, parser_hides=hides, usage=usage))
    added = dict.fromkeys(asked, True)
    sent = list(vllm_stream(added, parser_hides=hides, usage=usage))
    assert streamed("chat", sent, **asked) == direct.replace(b"agent@3", b"agent")


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("completions", {"echo": True}),
        ("completions", {"echo": True, "logprobs": 2}),
        ("chat", {"top_logprobs": 3}),
        ("chat", {"logprob_token_ids": [1]}),
        ("chat", {"logprobs": "maybe", "return_token_ids": "perhaps"}),
        ("responses", {"enable_response_messages": "perhaps", "include": "x"}),
    ],
)
def test_no_field_is_added_to_a_request_if_it_would_change_the_reply(
    api: str, fields: dict[str, Any]
) -> None:
    request = rewritten(api, **fields)
    assert request.injected == frozenset()
    assert json.loads(request.body).items() >= fields.items()


def test_invalid_token_ids_are_removed_from_the_reply_and_not_recorded() -> None:
    body = b'{"choices":[{"index":0,"text":"a","token_ids":[-1,1.5,"x"]}],"prompt_token_ids":[1]}'
    reply = follow("completions", rewritten("completions"), [body], VERSION, streamed=False)
    assert json.loads(reply.seen) == {
        "choices": [{"index": 0, "text": "a", "token_ids": None}],
        "prompt_token_ids": None,
    }
    assert reply.facts.sampled.sampled_ids is None
