"""Reading a reply takes work in proportion to its length, and memory for its words."""

import json
import tracemalloc
from typing import Any

import pytest

from proxy.formats import message_replies
from proxy.formats.base import BOM, ModelRequest, ReplyParser, read_request
from proxy.formats.choices import _merge_delta
from proxy.formats.message_replies import _merge_event
from proxy.formats.registry import FORMATS
from proxy.ingester.transcribe import transcribe
from tests.support.recordings import DONE, chunk, rewritten, sse
from tests.support.records import captured

WORK = {"compared": 0, "copied": 0}


class Index(int):
    """Counts how often it is compared."""

    def __lt__(self, other: int) -> bool:
        WORK["compared"] += 1
        return int(self) < int(other)


class Words(str):
    """Counts the characters that adding to it copies."""

    def __add__(self, other: str) -> "Words":
        WORK["copied"] += len(self) + len(other)
        return Words(str(self) + other)

    def __radd__(self, other: str) -> "Words":
        WORK["copied"] += len(self) + len(other)
        return Words(other + str(self))


def tool_call(index: int, words: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": Index(index), "function": {"arguments": Words(words)}}]}


def merged_calls(count: int) -> None:
    message: dict[str, Any] = {}
    for index in range(count):
        _merge_delta(message, tool_call(index, "{}"))


def merged_arguments(count: int) -> None:
    message: dict[str, Any] = {}
    for _ in range(count):
        _merge_delta(message, tool_call(0, "ab"))
        _merge_delta(message, {"content": Words("ab")})


def merged_blocks(count: int) -> None:
    message: dict[str, Any] = {"content": [{"type": "text", "text": Words("")}]}
    delta = {"type": "text_delta", "text": Words("ab")}
    for _ in range(count):
        _merge_event(message, {"type": "content_block_delta", "index": 0, "delta": delta})


@pytest.mark.parametrize("merge", [merged_calls, merged_arguments, merged_blocks])
def test_work_of_merging_a_streams_pieces_is_linear_in_their_number(merge: Any) -> None:
    work = []
    for count in (200, 400):
        WORK.update(compared=0, copied=0)
        merge(count)
        work.append(sum(WORK.values()))
    assert work[1] <= 2.2 * work[0]


def test_tool_arguments_are_parsed_once_however_many_usage_events_a_stream_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(message_replies, "_is_json", lambda text: not parsed.append(text))
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    usage = {"id": "r", "choices": [], "usage": {"prompt_tokens": 1}}
    stream = sse(chunk({"role": "assistant"}), chunk({"tool_calls": [call]}), *[usage] * 50)
    parser_of("messages").feed(stream + DONE)
    assert parsed == ["{}"]


COMMENTS = (b": ping\n", b": ping\n\n", b"\n", b": ping\r\n", b"\r", b"id: 5\n", b": a\rb\n")


def parser_of(api: str, request: ModelRequest | None = None) -> ReplyParser:
    asked = rewritten(api) if request is None else request
    return FORMATS[api].reply_parser(asked, "m@1", streamed=True)


@pytest.mark.parametrize("comment", COMMENTS)
@pytest.mark.parametrize("api", list(FORMATS))
def test_comments_and_blank_lines_are_passed_in_bulk(
    monkeypatch: pytest.MonkeyPatch, api: str, comment: bytes
) -> None:
    parser, lines = parser_of(api), []
    take = type(parser)._pass_line

    def counted(self: ReplyParser, line: bytes) -> bytes:
        lines.append(line)
        return take(self, line)

    monkeypatch.setattr(type(parser), "_pass_line", counted)
    apart = parser_of(api)
    passed = parser.feed(comment * 1000)
    # Taken one by one they are the same.
    monkeypatch.undo()
    expected = b"".join(apart.feed(comment) for _ in range(1000))
    assert len(lines) <= 4
    assert passed + parser.finish() == expected + apart.finish()


@pytest.mark.parametrize("api", list(FORMATS))
def test_reading_many_short_stream_comments_takes_less_memory_than_their_sum(api: str) -> None:
    request = json.dumps({"model": "m", "stream": True, "max_tokens": 4, "messages": []}).encode()
    size = 4 * 2**20
    call = captured(dialect=api, streamed=True, request=request, reply=b": ping\n" * (size // 7))
    tracemalloc.start()
    transcribe(call)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size


@pytest.mark.parametrize("api", list(FORMATS))
def test_stream_line_too_long_to_buffer_is_passed_on_and_parsing_resumes_after_it(
    api: str,
) -> None:
    parser = FORMATS[api].reply_parser(read_request(b"{}"), None, streamed=True)
    begin, rest = b'data: {"odd": "' + b"x" * 100, b'y"}\r\n\r\n'
    assert parser.feed(begin) == b""
    assert parser.waiting_bytes == len(begin)
    passed = parser.pass_buffered_line() + parser.feed(rest)
    if type(parser).__name__ != "TranslatedReply":
        assert passed == begin + rest
    assert parser.waiting_bytes == 0
    assert parser.feed(b": next\n") == parser._pass_comments(b": next\n")


def test_text_held_back_until_a_tool_call_ends_counts_as_waiting_bytes() -> None:
    parser = parser_of("messages")
    asked = {"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}
    parser.feed(sse(chunk({"role": "assistant"}), chunk({"tool_calls": [asked]})))
    parser.feed(sse(chunk({"content": "é" * 1000})))
    assert parser.waiting_bytes >= 2000


def test_abandoned_line_of_a_translated_stream_becomes_a_single_error_event() -> None:
    parser = parser_of("messages")
    parser.feed(b'data: {"choices": "' + b"x" * 100)
    passed = parser.pass_buffered_line() + parser.feed(b"xxx") + parser.feed(b'"}\n\n')
    assert passed.count(b"event: error") == 1
    assert b"xxx" not in passed


def test_abandoned_final_event_of_a_stream_is_held_back_until_its_release() -> None:
    parser = parser_of("responses")
    name, data = b"event: response.completed\n", b'data: {"type": "' + b"x" * 100
    assert parser.feed(name + data) == b""
    assert (parser.pass_buffered_line(), parser.at_end) == (b"", True)
    assert parser.release() + parser.feed(b'x"}\n\n') == name + data + b'x"}\n\n'


@pytest.mark.parametrize("end", [b"", b"\n", b"data: x\n"])
@pytest.mark.parametrize("api", list(FORMATS))
def test_stream_line_of_10000_byte_order_marks_is_passed_on_unchanged(api: str, end: bytes) -> None:
    line = BOM * 10_000 + end
    parser = FORMATS[api].reply_parser(read_request(b"{}"), None, streamed=True)
    seen = parser.feed(line) + parser.finish()
    assert seen == line or type(parser).__name__ == "TranslatedReply"
