"""Turn a piece of a segment into the database's record, or a reason why there is none (pure).

A worker's capture is parsed again in its wire format. The question of a request is the text of its
users' messages, without the instructions: these may hold the time of day or a session's id, and
then differ each time. Episodes with the same question form a group in the database, so the digest
of the same bytes must never change.
"""

import gc
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from proxy.exploring import with_changed_settings
from proxy.formats.base import (
    NOTHING_SAMPLED,
    ModelRequest,
    ReplyFacts,
    WireFormat,
    read_request,
    request_of,
)
from proxy.formats.raw_json import UNREADABLE, Object, parse_object
from proxy.formats.registry import FORMATS
from proxy.side_calls import side_kind
from proxy.spool.segments import MOST_INFLATED, CapturedCall, Piece, decode_payload, inflate
from proxy.tool_events import ResultReaders, not_offered_events, result_events, text_digest
from proxy.trainable import UNREAD_SETTINGS, JudgedSettings, Reason, judge_settings, why_untrainable
from store.records import EXPLORED, CallRecord, SpoolRecord, Tokens, ToolEvent
from store.tenants import name_in_same_tenant
from store.values.documents import MAX_DEPTH, nests_too_deep
from store.values.packing import pack_ids, pack_logprobs

_RESULT: Final = "tool_result"


def question_digest(call: CallRecord) -> bytes | None:
    """Return a digest of all user messages in a call's request.

    Return None if the request cannot be read, has no such text, or its wire format is unknown.
    """
    wire_format = FORMATS.get(call.dialect)
    if wire_format is None or call.request is None:
        return None
    parsed = parse_object(call.request)
    if parsed is None:
        return None
    try:
        return _digest(map(_message_text, map(bytes, wire_format.turns.user_contents(parsed))))
    except UNREADABLE:
        return None


def _digest(texts: Iterable[bytes]) -> bytes | None:
    """Return a digest of texts and of their lengths; None if all are empty."""
    digest, has_text = sha256(), False
    for text in texts:
        digest.update(b"%d:" % len(text))
        digest.update(text)
        has_text |= bool(text)
    return digest.digest() if has_text else None


def _message_text(content: bytes) -> bytes:
    """Return the text of a message's content (JSON), which is a string or a list of parts."""
    # A string without escapes: its bytes are its text.
    if content[:1] == content[-1:] == b'"' and b"\\" not in content and content.isascii():
        return content[1:-1]
    return b"".join(_texts(msgspec.json.decode(content)))


def _texts(content: Any) -> Iterator[bytes]:
    """Yield a content's texts, and its other parts as JSON, except results of tools."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text.encode(errors="surrogatepass")
        elif isinstance(part, dict) and part.get("type") != _RESULT:
            yield msgspec.json.encode(part, order="sorted")


TOO_DEEP: Final[Reason] = "nested_too_deep"
TOO_LONG: Final[Reason] = "reply_too_long"
# A reply is parsed in blocks of at least so many bytes.
BLOCK_BYTES: Final = 64 * 1024
NO_READERS = ResultReaders()
NO_REPLY = ReplyFacts(None, None, None, None, (), NOTHING_SAMPLED)
CANNOT_BE_READ: Final = "cannot be read"
TAKES_LONG: Final = "takes long to be read"


class Entry(NamedTuple):
    """A piece of a segment with its record, or with the reason why it has none."""

    piece: Piece
    record: SpoolRecord | None
    reason: str


class TakesLong(Exception):
    """Report that a call's reply is too long to be parsed while other records wait."""


def read_entry(
    piece: Piece,
    readers: ResultReaders = NO_READERS,
    most_reply: int = MOST_INFLATED,
    at_once: float = inf,
) -> Entry:
    """Return the record of a piece, or why it has none.

    The reason is `TAKES_LONG` if the call's reply is longer than `at_once` bytes.

    This never raises: a record that cannot be read must not stop the others.
    """
    if piece.damage:
        return Entry(piece, None, piece.damage)
    try:
        try:
            return Entry(piece, record_of(piece.data, readers, most_reply, at_once), "")
        except MemoryError:
            # Other work may have held the memory: collect garbage and try once more.
            gc.collect()
            return Entry(piece, record_of(piece.data, readers, most_reply), "")
    except TakesLong:
        return Entry(piece, None, TAKES_LONG)
    except Exception as error:
        # Clients and models determine the content; reading it again would fail the same way.
        cause = f"{type(error).__name__} at {raised_at(error)}"
        return Entry(piece, None, f"{CANNOT_BE_READ}: {cause}: {error}")


def raised_at(error: Exception) -> str:
    """Return file and line of the code that raised `error`, as `file.py:12`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def record_of(
    payload: bytes,
    readers: ResultReaders = NO_READERS,
    most_reply: int = MOST_INFLATED,
    at_once: float = inf,
) -> SpoolRecord:
    """Return the database's record of a spooled payload.

    Raises:
        TakesLong: the call's reply is longer than `at_once` bytes.
        Exception: this version of Pawl cannot read the payload. Any exception is possible, because
            clients and models determine the content.
    """
    frame = decode_payload(payload)
    if isinstance(frame, CapturedCall):
        if frame.reply_bytes > at_once and not frame.is_reply_cut:
            raise TakesLong
        return transcribe(frame, readers, most_reply)
    return frame


def transcribe(
    captured: CapturedCall, readers: ResultReaders = NO_READERS, most_reply: int = MOST_INFLATED
) -> CallRecord:
    """Return the database's record of a captured call, with the request as the client sent it.

    Raises:
        zlib.error: the reply was deflated and is damaged.
        ReplyTooLong: the reply is longer than `most_reply` bytes.
    """
    wire_format = FORMATS[captured.dialect]
    turns = wire_format.turns
    request, raw_fields = _read_request(captured.request, wire_format)
    raw = inflate(captured.reply, most_reply) if captured.deflated else captured.reply
    sent = (
        request if captured.explored is None else with_changed_settings(request, captured.explored)
    )
    facts, unread = _reply_facts(captured, sent, raw)
    settings = judge_settings(captured, sent)
    if captured.explored is not None:
        settings = settings.with_setting(EXPLORED, captured.explored)
    side = side_kind(captured.request, request.fields, raw_fields, turns)
    reason: Reason | None
    if unread is not None:
        reason = unread
    elif captured.policy is not None and captured.policy_version is None:
        reason = "fixed_policy"
    else:
        reason = why_untrainable(
            captured.status,
            captured.http_status,
            captured.policy_version,
            facts.sampled,
            settings.why_not_replayed,
            only_text=raw_fields is None or turns.only_text(raw_fields),
            is_side=side is not None,
        )
    events, quotable = captured.tool_events, None
    # The last tool call of a reply that was cut off may lack a part of its name.
    if facts.tool_calls and captured.status == "complete":
        tools = wire_format.sampling.tools(request.fields)
        unknown = not_offered_events(UUID(bytes=captured.id), tools, facts.tool_calls)
        events = (*events, *unknown)
    # Results of tools are read if the API states how a tool ended, or a reader is configured.
    if turns.states_errors or readers.give_verdicts:
        events = (*events, *result_events(UUID(bytes=captured.id), turns, raw_fields, readers))
        # The text of a reply without tool calls, which a later call may quote.
        quotable = None if facts.tool_calls else text_digest(facts.text)
    return _record(captured, request, raw, facts, settings, reason, events, quotable, side)


def record_without_content(captured: CapturedCall) -> CallRecord:
    """Return a captured call's record without request and reply, which are not parsed."""
    unknown = msgspec.json.encode({UNREAD_SETTINGS: ["request"]})
    settings = JudgedSettings(unknown, TOO_DEEP, TOO_DEEP)
    events = captured.tool_events
    return _record(captured, ModelRequest(b""), b"", NO_REPLY, settings, TOO_DEEP, events, None)


def _record(
    captured: CapturedCall,
    request: ModelRequest,
    raw: bytes,
    facts: ReplyFacts,
    settings: JudgedSettings,
    reason: Reason | None,
    events: tuple[ToolEvent, ...],
    quotable: UUID | None,
    side: str | None = None,
) -> CallRecord:
    response_id, sampled = facts.response_id, facts.sampled
    return CallRecord(
        # Four times as fast as `UUID(bytes=...)`.
        id=msgspec.convert(captured.id, UUID),
        episode=captured.episode,
        method=captured.method,
        confidence=captured.confidence,
        agent=captured.agent,
        lane=captured.lane,
        task=captured.task,
        dialect=captured.dialect,
        policy=captured.policy,
        policy_version=captured.policy_version,
        served_model=captured.served_model,
        status=captured.status,
        http_status=captured.http_status,
        stream=request.stream,
        request=None if request.parsed is None else request.body,
        request_raw=request.body if request.parsed is None else None,
        reply=facts.reply,
        reply_raw=raw or None if facts.reply is None else None,
        response_id=response_id and name_in_same_tenant(captured.episode, response_id),
        tokens=Tokens(
            prompt_ids=pack_ids(sampled.prompt_ids or ()),
            sampled_ids=pack_ids(sampled.sampled_ids or ()),
            sampled_logprobs=pack_logprobs(sampled.sampled_logprobs or ()),
        ),
        sampling=settings.recorded,
        trainable=reason is None,
        reason=reason,
        side=side,
        tool_calls=facts.tool_calls,
        tool_events=events,
        usage=None if facts.usage is None else msgspec.json.encode(facts.usage),
        finish=facts.finish,
        started_at=datetime.fromtimestamp(captured.started_at, UTC),
        first_chunk_ms=captured.first_chunk_ms,
        total_ms=captured.total_ms,
        retry=captured.retry,
        provides=captured.provides,
        needs=captured.needs,
        retry_of=None if captured.retry_of is None else UUID(bytes=captured.retry_of),
        split=captured.split,
        arm=captured.arm,
        api_key=captured.api_key,
        text_digest=quotable,
        trace=captured.trace,
    )


def _read_request(body: bytes, wire_format: WireFormat) -> tuple[ModelRequest, Object | None]:
    """Return the request with the fields needed to read its reply, and all its fields unparsed.

    The other fields may be very large, and are never parsed as a whole: the request is stored as
    bytes.
    """
    if not wire_format.unneeded_fields:
        request = read_request(body)
        return request, request.parsed
    raw_fields = parse_object(body)
    if raw_fields is None or nests_too_deep(body):
        return ModelRequest(body=body), raw_fields
    read = {
        name: raw for name, raw in raw_fields.items() if name not in wire_format.unneeded_fields
    }
    return request_of(body, read), raw_fields


def _reply_facts(
    captured: CapturedCall, request: ModelRequest, raw: bytes
) -> tuple[ReplyFacts, Reason | None]:
    """Return the reply's facts, and a reason if reply or request cannot be read, else None.

    A reply that nests too deep, or was too long to be kept whole, is stored as raw bytes: only its
    id is read, because feedback may name it.
    """
    deep_request = TOO_DEEP if request.parsed is None and nests_too_deep(request.body) else None
    if captured.http_status is None:
        # The upstream gave no reply.
        return NO_REPLY, deep_request
    unread: Reason | None = None
    if captured.is_reply_cut:
        unread = TOO_LONG
    elif any(map(_is_deep, _blocks(raw)) if captured.streamed else [nests_too_deep(raw)]):
        unread = TOO_DEEP
    wire_format, name = FORMATS[captured.dialect], captured.served_model
    rewritten = wire_format.rewrite(request, name, want_ids=captured.wanted_ids)
    parser = wire_format.reply_parser(
        rewritten,
        name,
        streamed=captured.streamed,
        status=captured.http_status,
        reading=unread is None,
    )
    for block in _blocks(raw):
        parser.feed(block)
    if not captured.is_reply_cut and (captured.streamed or captured.status == "complete"):
        # A stream that was cut off counts as finished.
        parser.finish()
    if unread is not None:
        return msgspec.structs.replace(NO_REPLY, response_id=parser.summary().response_id), unread
    facts = parser.facts()
    arguments = (call.arguments.encode(errors="surrogatepass") for call in facts.tool_calls)
    if facts.too_deep or any(map(nests_too_deep, (facts.reply or b"", *arguments))):
        return msgspec.structs.replace(NO_REPLY, response_id=facts.response_id), TOO_DEEP
    return facts, deep_request


def _blocks(raw: bytes) -> Iterator[bytes]:
    """Yield a reply in blocks of whole lines: parsed at once, it takes many times its memory."""
    start = 0
    while start < len(raw):
        end = raw.find(b"\n", start + BLOCK_BYTES) + 1 or len(raw)
        yield raw[start:end]
        start = end


def _is_deep(block: bytes) -> bool:
    """Return whether a line of this part of a stream is JSON that nests too deep to be parsed."""
    if block.count(b"[") + block.count(b"{") <= MAX_DEPTH:
        return False
    return any(map(nests_too_deep, block.split(b"\n")))
