"""Make a call's record, however the call ended; count the call and log it.

A call's line in the log never holds a prompt, a key or a body.
"""

import asyncio
from time import monotonic, perf_counter
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec
import structlog

from proxy.calls.answer import FIRST_ERROR_STATUS
from proxy.formats.base import ReplySummary
from proxy.identity.call_memory import provided_fingerprints
from proxy.keys import Usage, tokens_of
from proxy.metrics import CALL_SECONDS, CALLS, EXPLORED, labelled, status_class
from proxy.spool.segments import CapturedCall
from proxy.upstreams.server import is_event_stream
from store.records import CallStatus
from store.tenants import DEFAULT, keyed_digests

if TYPE_CHECKING:
    from proxy.calls.call import Call

log = structlog.get_logger()
# A reply's summary, and the call's fingerprints, which later calls may repeat.
ReplyRead = tuple[ReplySummary, tuple[bytes, ...]]


class RecordedCall(msgspec.Struct, frozen=True):
    """A call that was recorded; `capture` is None if the record could not be made.

    The result of `on_disk` is whether the record is durable.
    """

    capture: CapturedCall | None
    on_disk: "asyncio.Future[bool]"


def record_call(call: "Call", status: CallStatus) -> RecordedCall:
    """Make a call's record and hand it to the recorder; if that fails, count it as lost."""
    parts, capture = call.parts, None
    try:
        summary, provided = _summary_and_provided(call, status)
        capture = _capture_call(call, status, provided)
        if call.usage is not None and call.usage.counts_tokens:
            _charge_tokens(call.usage, capture)
        parts.targets.remember(capture, call.name, summary.response_id)
        return RecordedCall(capture, parts.recorder.queue_call(capture))
    except Exception:
        log.exception("record_not_made", call=call.name)
        return RecordedCall(capture, parts.recorder.count_lost(call.identity.episode))


def read_reply(call: "Call") -> ReplyRead:
    """Return the reply's summary and the fingerprints that the call provides; change nothing."""
    parser = None if call.answer is None else call.answer.parser
    summary = ReplySummary() if parser is None else parser.summary()
    conversation = call.identity.conversation
    return summary, provided_fingerprints(
        call.format.turns, call.request.fields, summary, conversation
    )


def _summary_and_provided(call: "Call", status: CallStatus) -> ReplyRead:
    """Return the reply's summary and the fingerprints that the call provides.

    Both are empty if reading fails. The fingerprints are also remembered here, before the reply's
    end leaves: the client's next call may follow at once.
    """
    try:
        reading = call.reading
        if reading is None or not reading.done() or reading.cancelled():
            summary, provided = read_reply(call)
        else:
            summary, provided = reading.result()
        identity, memory, tenant = call.identity, call.parts.memory, call.exchange.tenant
        if tenant != DEFAULT:
            provided = keyed_digests(tenant, provided)
        memory.provide(provided, identity.episode, identity.follows)
        got_reply = call.reply is not None and call.reply.status < FIRST_ERROR_STATUS
        if not got_reply or status != "complete":
            body, attempt = call.request.body, UUID(bytes=call.id)
            memory.remember_failed(body, identity.episode, attempt, identity.split)
        return summary, provided
    except Exception:
        log.exception("fingerprints_not_read", call=call.name)
        return ReplySummary(), ()


def _capture_call(call: "Call", status: CallStatus, provided: tuple[bytes, ...]) -> CapturedCall:
    answer, from_upstream = call.answer, call.reply
    reply, deflated = (b"", False) if answer is None else answer.buffer.kept_bytes()
    if answer is not None:
        streamed = answer.streamed
    else:
        streamed = from_upstream is not None and is_event_stream(from_upstream)
    identity, routed, serving = call.identity, call.routed, call.routed.serving
    defaults = call.sampling_defaults()
    return CapturedCall(
        id=call.id,
        episode=identity.episode,
        method=identity.method,
        confidence=identity.confidence,
        agent=identity.agent,
        task=identity.task,
        dialect=call.format.name,
        policy=serving.policy,
        policy_version=serving.version,
        served_model=serving.served_name,
        wanted_ids=bool(routed.request.injected),
        status=status,
        http_status=None if from_upstream is None else from_upstream.status,
        streamed=streamed,
        request=call.request.body,
        reply=reply,
        deflated=deflated,
        provides=provided,
        needs=identity.needs,
        retry_of=None if identity.retry_of is None else identity.retry_of.bytes,
        retry=identity.retry,
        tool_events=call.tool_events,
        default_temperature=defaults.temperature,
        started_at=call.started_at,
        first_chunk_ms=None if answer is None else answer.first_chunk_ms,
        total_ms=(perf_counter() - call.arrived_at) * 1000,
        sampling_defaults=defaults.others,
        split=identity.split,
        tool_grammars=defaults.tool_grammars,
        explored=routed.explored,
        tool_tag=defaults.tool_tag,
        arm=serving.arm,
        api_key=call.exchange.api_key,
        trace=identity.trace,
        reply_bytes=0 if answer is None else answer.buffer.arrived_bytes,
        lane=identity.lane,
    )


def _charge_tokens(usage: Usage, capture: CapturedCall) -> None:
    """Charge a call's tokens to its key; never raise, so that the call is recorded anyway.

    This happens before the reply's end leaves: the client's next request may follow at once.
    """
    try:
        used = tokens_of(
            capture.request,
            capture.reply,
            deflated=capture.deflated,
            refused=(capture.http_status or FIRST_ERROR_STATUS) >= FIRST_ERROR_STATUS,
            whole_bytes=capture.reply_bytes if capture.is_reply_cut else 0,
        )
        usage.charge_tokens(monotonic(), used)
    except Exception:
        log.exception("tokens_not_counted")


def count_and_log_call(call: "Call", capture: CapturedCall) -> None:
    """Count a call that has ended, and log its line."""
    stream = "true" if capture.streamed else "false"
    version = "" if capture.policy_version is None else str(capture.policy_version)
    answered = status_class(call.exchange.status)
    labelled(CALLS, capture.policy or "", version, capture.status, answered, stream).inc()
    labelled(CALL_SECONDS, stream).observe(capture.total_ms / 1000)
    for kind in capture.explored or ():
        labelled(EXPLORED, capture.policy or "", kind).inc()
    first_ms, tenant = capture.first_chunk_ms, call.exchange.tenant
    # A line without a tenant is the default tenant's: most proxies have no other.
    tenant_field = {} if tenant == DEFAULT else {"tenant": tenant}
    log.debug(
        "call",
        call=call.name,
        episode=call.identity.name,
        key=call.exchange.key_name,
        method=capture.method,
        agent=capture.agent,
        model=call.request.model,
        served=capture.served_model,
        status=capture.status,
        http_status=capture.http_status,
        stream=capture.streamed,
        first_chunk_ms=None if first_ms is None else round(first_ms, 1),
        total_ms=round(capture.total_ms, 1),
        ids=capture.wanted_ids,
        bytes=len(capture.request) + len(capture.reply),
        retry=capture.retry,
        warnings=len(call.warnings),
        **tenant_field,
    )
