"""Read what a request asks: what users say in it, whatever the instructions beside it (pure).

Instructions may hold the time of day or a session's id, and are then never the same twice. What was
said by the assistant, and what tools gave, is no question either. The ingester hands `question_of`
to the store, which asks only where an episode's task may come of it. Episodes of one question are a
group in the database, so that the digest of the same bytes must never change.


Turn a piece of a segment into the ledger's record, or a reason why there is none (pure).

A worker's capture is read again in its format.
"""

import gc
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from proxy.exploring import with_explored
from proxy.formats.base import (
    NOTHING_SAMPLED,
    ModelRequest,
    ReplyFacts,
    Sampled,
    WireFormat,
    read_request,
    request_of,
)
from proxy.formats.raw_json import UNREADABLE, Object, parse_object
from proxy.formats.registry import FORMATS
from proxy.spool.segments import MOST_INFLATED, CapturedCall, Gap, Piece, decode_payload, inflate
from proxy.tool_events import ResultReaders, result_events, text_digest
from proxy.trainable import UNREAD_SETTINGS, Judged, Reason, first_reason, judged_settings
from store.records import EXPLORED, CallRecord, GapRecord, SpoolRecord, Tokens, ToolEvent
from store.tenants import same_tenant
from store.values.json_limits import nests_too_deep
from store.values.tokens import pack_ids, pack_logprobs

_RESULT: Final = "tool_result"


def question_of(call: CallRecord) -> bytes | None:
    """Return a digest of what users say in a call's request, as its wire format holds it.

    Return None if the request cannot be read, nobody says anything, or the format is unknown.
    """
    wire_format = FORMATS.get(call.dialect)
    if wire_format is None or call.request is None:
        return None
    parsed = parse_object(call.request)
    if parsed is None:
        return None
    try:
        return _digest(map(_spoken, map(bytes, wire_format.turns.said_by_users(parsed))))
    except UNREADABLE:
        return None


def _digest(texts: Iterable[bytes]) -> bytes | None:
    """Return a digest of texts, and of where each ends; None if all are empty.

    Text is the same as a string or as parts.
    """
    digest, is_asked = sha256(), False
    for text in texts:
        digest.update(b"%d:" % len(text))
        digest.update(text)
        is_asked |= bool(text)
    return digest.digest() if is_asked else None


def _spoken(content: bytes) -> bytes:
    """Return the text of one message, whose content is JSON."""
    # The bytes of such a string are its text: there is nothing to decode, and to encode again.
    if content[:1] == content[-1:] == b'"' and b"\\" not in content and content.isascii():
        return content[1:-1]
    return b"".join(_texts(msgspec.json.decode(content)))


def _texts(content: Any) -> Iterator[bytes]:
    """Yield the text of one message; parts that are no text as JSON, but for results of tools."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text.encode(errors="surrogatepass")
        elif isinstance(part, dict) and part.get("type") != _RESULT:
            yield msgspec.json.encode(part, order="sorted")


TOO_DEEP: Final[Reason] = "nested_too_deep"
NO_READERS = ResultReaders()
NO_REPLY = ReplyFacts(None, None, None, None, (), NOTHING_SAMPLED)
CANNOT_BE_READ: Final = "cannot be read"


class _Read(NamedTuple):
    """Hold what was found out about a captured call, which its capture does not state.

    `raw` is the reply as it came, `reason` why the call cannot be trained on, and `quotable` the
    digest of what a later call may quote.
    """

    request: ModelRequest
    raw: bytes
    facts: ReplyFacts
    settings: Judged
    reason: Reason | None
    events: tuple[ToolEvent, ...]
    quotable: UUID | None = None


class Entry(NamedTuple):
    """Hold a piece of a segment with its record, or with the reason why it has none."""

    piece: Piece
    record: SpoolRecord | None
    reason: str


def read_entry(
    piece: Piece, readers: ResultReaders = NO_READERS, most_reply: int = MOST_INFLATED
) -> Entry:
    """Return the record of a piece, or why it cannot be read.

    This never raises: a record that cannot be read must not stop the others.
    """
    if piece.damage:
        return Entry(piece, None, piece.damage)
    try:
        try:
            return Entry(piece, record_of(piece.data, readers, most_reply), "")
        except MemoryError:
            # Other work may have held the memory: collect garbage and try once more.
            gc.collect()
            return Entry(piece, record_of(piece.data, readers, most_reply), "")
    except Exception as error:
        # Clients and models decide what is in it; reading it again would fail the same way.
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
    payload: bytes, readers: ResultReaders = NO_READERS, most_reply: int = MOST_INFLATED
) -> SpoolRecord:
    """Return the ledger's record in a spooled payload.

    Raises:
        Exception: this version of Pawl cannot read it. The type is not narrower, because the
            content is a client's and a model's.
    """
    frame = decode_payload(payload)
    if isinstance(frame, CapturedCall):
        return transcribe(frame, readers, most_reply)
    if isinstance(frame, Gap):
        return GapRecord(id=UUID(bytes=frame.id), episodes=frame.episodes)
    return frame


def transcribe(
    captured: CapturedCall, readers: ResultReaders = NO_READERS, most_reply: int = MOST_INFLATED
) -> CallRecord:
    """Return the ledger's record of a captured call; the request in it is the client's own.

    Args:
        captured: what the worker wrote down.
        readers: how the results of tools in the request are read.
        most_reply: longest reply that is read, in bytes.

    Raises:
        zlib.error: the reply was deflated and is damaged.
        ReplyTooLong: the reply is longer than `most_reply` bytes.
    """
    request, shown = _read_request(captured.request, FORMATS[captured.dialect])
    raw = inflate(captured.reply, most_reply) if captured.deflated else captured.reply
    sent = request if captured.explored is None else with_explored(request, captured.explored)
    facts, deep = _reply_facts(captured, sent, raw)
    settings = judged_settings(captured, sent)
    if captured.explored is not None:
        settings = settings.with_setting(EXPLORED, captured.explored)
    reason = TOO_DEEP if deep else _reason(captured, facts, settings, shown)
    events, quotable = captured.tool_events, None
    if _reads_results(captured, readers):
        events = (*events, *_results(captured, shown, readers))
        quotable = _quotable(facts)
    return _record(captured, _Read(request, raw, facts, settings, reason, events, quotable))


def unread_call(captured: CapturedCall) -> CallRecord:
    """Return the record of a captured call of which nothing is read, request and reply left out."""
    request = ModelRequest(body=b"")
    unknown = msgspec.json.encode({UNREAD_SETTINGS: ["request"]})
    events, reason = captured.tool_events, TOO_DEEP
    settings = Judged(unknown, reason, reason)
    return _record(captured, _Read(request, b"", NO_REPLY, settings, reason, events))


def _record(captured: CapturedCall, read: _Read) -> CallRecord:
    """Return the record of a call; all that is to be found out about it is known."""
    request, facts, response_id = read.request, read.facts, read.facts.response_id
    return CallRecord(
        # A quarter of the time that `UUID(bytes=...)` takes.
        id=msgspec.convert(captured.id, UUID),
        episode=captured.episode,
        method=captured.method,
        confidence=captured.confidence,
        agent=captured.agent,
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
        reply_raw=read.raw or None if facts.reply is None else None,
        response_id=response_id and same_tenant(captured.episode, response_id),
        tokens=_tokens(facts.sampled),
        sampling=read.settings.recorded,
        trainable=read.reason is None,
        reason=read.reason,
        tool_calls=facts.tool_calls,
        tool_events=read.events,
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
        text_digest=read.quotable,
    )


def _read_request(body: bytes, wire_format: WireFormat) -> tuple[ModelRequest, Object | None]:
    """Return the request as far as its reply is read by it, and all of its fields unparsed.

    The request is stored as bytes. Fields that the reply can be read without may be very large,
    and are never parsed as a whole.
    """
    if not wire_format.unread:
        request = read_request(body)
        return request, request.parsed
    shown = parse_object(body)
    if shown is None or nests_too_deep(body):
        return ModelRequest(body=body), shown
    read = {name: raw for name, raw in shown.items() if name not in wire_format.unread}
    return request_of(body, read), shown


def _reply_facts(
    captured: CapturedCall, request: ModelRequest, raw: bytes
) -> tuple[ReplyFacts, bool]:
    """Return the reply's facts, and whether it or the request nests too deep to be read."""
    deep = _reply_nests_too_deep(raw, captured.streamed)
    facts = _facts(captured, request, raw, reading=not deep)
    if deep or facts.too_deep or _nests_too_deep(facts):
        return _unreadable(facts), True
    return facts, request.parsed is None and nests_too_deep(request.body)


def _reason(
    captured: CapturedCall,
    facts: ReplyFacts,
    settings: Judged,
    shown: Object | None,
) -> Reason | None:
    """Return why the call cannot be trained on, or None if it can."""
    if captured.policy is not None and captured.policy_version is None:
        return "fixed_policy"
    turns = FORMATS[captured.dialect].turns
    return first_reason(
        captured.status,
        captured.http_status,
        captured.policy_version,
        facts.sampled,
        settings.why_not,
        only_text=shown is None or turns.only_text(shown),
    )


def _reply_nests_too_deep(raw: bytes, streamed: bool) -> bool:
    """Return whether the reply, or an event of it, nests too deep for a JSON reader."""
    return any(map(nests_too_deep, raw.split(b"\n"))) if streamed else nests_too_deep(raw)


def _nests_too_deep(facts: ReplyFacts) -> bool:
    """Return whether the assembled reply, or a tool call's arguments, nest too deep to read."""
    return (facts.reply is not None and nests_too_deep(facts.reply)) or any(
        nests_too_deep(call.arguments.encode(errors="surrogatepass")) for call in facts.tool_calls
    )


def _unreadable(facts: ReplyFacts) -> ReplyFacts:
    """Return the facts of a reply that is kept as raw bytes: its id, which feedback may name."""
    return msgspec.structs.replace(NO_REPLY, response_id=facts.response_id)


def _facts(
    captured: CapturedCall, request: ModelRequest, raw: bytes, *, reading: bool
) -> ReplyFacts:
    """Return what is to be recorded of a reply.

    Without `reading` the reply is followed as the worker did it, and only its id is returned.
    """
    if captured.http_status is None:
        # The upstream gave no reply.
        return NO_REPLY
    wire_format, name = FORMATS[captured.dialect], captured.served_model
    rewritten = wire_format.rewrite(request, name, want_ids=captured.wanted_ids)
    parser = wire_format.reply(
        rewritten,
        name,
        streamed=captured.streamed,
        status=captured.http_status,
        reading=reading,
    )
    parser.feed(raw)
    if captured.streamed or captured.status == "complete":
        # The worker took what there was of a stream as its end.
        parser.finish()
    if not reading:
        return msgspec.structs.replace(NO_REPLY, response_id=parser.summary().response_id)
    return parser.facts()


def _results(
    captured: CapturedCall, shown: Object | None, readers: ResultReaders
) -> tuple[ToolEvent, ...]:
    """Return an event for each tool result in the request."""
    turns = FORMATS[captured.dialect].turns
    return result_events(UUID(bytes=captured.id), turns, shown, readers)


def _quotable(facts: ReplyFacts) -> UUID | None:
    """Return the digest of what a reply says that asks for no tool; a later call may quote it."""
    return None if facts.tool_calls else text_digest(facts.text)


def _reads_results(captured: CapturedCall, readers: ResultReaders) -> bool:
    """Return whether results are read: the API states how a tool ended, or there is a reader."""
    return FORMATS[captured.dialect].turns.states_errors or readers.give_verdicts


def _tokens(sampled: Sampled) -> Tokens:
    return Tokens(
        prompt_ids=pack_ids(sampled.prompt_ids or ()),
        sampled_ids=pack_ids(sampled.sampled_ids or ()),
        sampled_logprobs=pack_logprobs(sampled.sampled_logprobs or ()),
    )
