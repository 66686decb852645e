"""Turns a worker's capture into the ledger's record (pure), by reading it again in its dialect."""

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec

from proxy.calls.capture import MOST_INFLATED, CapturedCall, inflate
from proxy.calls.trainable import NOTHING_SAMPLED, Reason, Sampled, why_not_trainable
from proxy.formats.base import ModelRequest, ReplyFacts, Transcript, parse_object, read_request
from proxy.formats.choices.chat_reply import read_reply
from proxy.formats.choices.replies import StreamedReply
from proxy.formats.registry import DIALECTS
from proxy.keeper.sampling import sampling_settings
from proxy.tools.result_readers import ResultReaders
from proxy.tools.tool_results import result_events
from store.records import CallRecord, Tokens, ToolEvent
from store.values.json_limits import MAX_DEPTH, most_of, nests_too_deep
from store.values.tokens import pack_ids, pack_logprobs

# Parts of a request that are not parsed: the request is stored as bytes, and in these dialects
# the reply can be read without them.
UNREAD = {"chat": ("messages",), "completions": ("prompt",)}
TOO_DEEP: Final = "nested_too_deep"
NO_READERS = ResultReaders()
NO_REPLY = ReplyFacts(None, None, None, None, (), NOTHING_SAMPLED, whole=False)


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
    request = read_request(captured.request, without=UNREAD.get(captured.dialect, ()))
    raw = inflate(captured.reply, captured.deflated, most_reply)
    deep = _reply_nests_too_deep(raw, captured.streamed)
    facts = _facts(captured, request, raw, reading=not deep)
    if deep or _nests_too_deep(facts) or _arguments_nest_too_deep(captured, raw):
        facts, deep = _unreadable(facts), True
    deep |= request.parsed is None and nests_too_deep(request.body)
    fields = None if request.parsed is None else request.fields
    sampling = sampling_settings(fields, captured.default_temperature)
    reason: Reason | None = TOO_DEEP
    if not deep:
        reason = why_not_trainable(
            captured.status,
            captured.http_status,
            captured.policy_version,
            sampling,
            facts.sampled,
        )
    return CallRecord(
        id=UUID(bytes=captured.id),
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
        reply_raw=raw or None if facts.reply is None else None,
        response_id=facts.response_id,
        tokens=_tokens(facts.sampled),
        sampling=msgspec.json.encode(sampling),
        trainable=reason is None,
        reason=reason,
        tool_calls=facts.tool_calls,
        tool_events=(*captured.tool_events, *_results(captured, request, readers)),
        usage=None if facts.usage is None else msgspec.json.encode(facts.usage),
        finish=facts.finish,
        started_at=datetime.fromtimestamp(captured.started_at, UTC),
        first_chunk_ms=captured.first_chunk_ms,
        total_ms=captured.total_ms,
        retry=captured.retry,
        provides=captured.provides,
        needs=captured.needs,
        retry_of=None if captured.retry_of is None else UUID(bytes=captured.retry_of),
    )


def _reply_nests_too_deep(raw: bytes, streamed: bool) -> bool:
    """Return whether the reply, or an event of it, nests too deep for a JSON reader."""
    return any(map(nests_too_deep, raw.split(b"\n"))) if streamed else nests_too_deep(raw)


def _nests_too_deep(facts: ReplyFacts) -> bool:
    """Return whether the assembled reply, or a tool call's arguments, nest too deep to read."""
    return (facts.reply is not None and nests_too_deep(facts.reply)) or any(
        nests_too_deep(call.arguments.encode(errors="surrogatepass")) for call in facts.tool_calls
    )


def _arguments_nest_too_deep(captured: CapturedCall, raw: bytes) -> bool:
    """Return whether a chat's reply that became a message has arguments that nest too deep.

    A tool call's arguments are text in a chat, and a structure in a message.
    """
    if captured.dialect != "messages" or captured.streamed or most_of(raw).containers <= MAX_DEPTH:
        return False
    reply = read_reply(raw)
    messages = [choice.message for choice in (reply.choices or ())] if reply is not None else []
    calls = [call for message in messages if message for call in message.tool_calls or ()]
    return any(
        nests_too_deep((call.function.arguments or "").encode(errors="surrogatepass"))
        for call in calls
    )


def _unreadable(facts: ReplyFacts) -> ReplyFacts:
    """Return the facts of a reply that is kept as raw bytes: its id, which feedback may name."""
    return msgspec.structs.replace(NO_REPLY, response_id=facts.response_id, whole=facts.whole)


def _facts(
    captured: CapturedCall, request: ModelRequest, raw: bytes, *, reading: bool
) -> ReplyFacts:
    """Return what is to be recorded of a reply.

    Without `reading` the reply is followed as the worker did it, and only its id is returned.
    """
    if captured.http_status is None:
        # The upstream gave no reply.
        return NO_REPLY
    dialect = DIALECTS[captured.dialect]
    rewritten = dialect.rewrite(request, captured.served_model, want_ids=captured.wanted_ids)
    name = captured.served_model
    transcript: Transcript = (
        dialect.streamed(rewritten, name, reading=reading)
        if captured.streamed
        else dialect.whole(rewritten, name, reading=reading, status=captured.http_status)
    )
    if reading and isinstance(transcript, StreamedReply):
        transcript.reread(raw)
    else:
        transcript.feed(raw)
    if captured.streamed or captured.status == "complete":
        transcript.finish()
    if not reading:
        return msgspec.structs.replace(NO_REPLY, response_id=transcript.summary().response_id)
    return transcript.facts()


def _results(
    captured: CapturedCall, request: ModelRequest, readers: ResultReaders
) -> tuple[ToolEvent, ...]:
    """Return an event for each tool result in the request."""
    if captured.dialect != "messages" and not readers:
        # Only Anthropic's API states how a tool ended. In the others it takes a configured reader.
        return ()
    unread = captured.dialect in UNREAD
    parsed = parse_object(captured.request) if unread else request.parsed
    return result_events(UUID(bytes=captured.id), captured.dialect, parsed, readers)


def _tokens(sampled: Sampled) -> Tokens:
    return Tokens(
        prompt_ids=pack_ids(sampled.prompt_ids or ()),
        sampled_ids=pack_ids(sampled.sampled_ids or ()),
        sampled_logprobs=pack_logprobs(sampled.sampled_logprobs or ()),
    )
