"""Take the last step of a call: make its record exactly once, whatever the call came to.

A call that has ended is counted, and has one line in the log, which never holds a prompt, a key or
a body.
"""

import asyncio
from time import monotonic, perf_counter
from typing import Final
from uuid import UUID

import msgspec
import structlog

from proxy.calls.answering import Answer
from proxy.calls.asking import Arrived, CallIdentity
from proxy.calls.routing import CallRouter, Routed
from proxy.formats.base import ReplySummary
from proxy.identity.call_memory import CallMemory, provided_fingerprints
from proxy.keys.limits import Usage, tokens_of
from proxy.metrics import CALL_SECONDS, CALLS, EXPLORED, labelled
from proxy.spool.recorder import Recorder
from proxy.spool.segments import CapturedCall
from proxy.upstreams.replies import Reply, comes_in_events
from store.records import CallStatus
from store.tenants import DEFAULT, own_digests

log = structlog.get_logger()

ERRORS: Final = 400


class Answered(msgspec.Struct, frozen=True):
    """State what a call came to: how it ended, and how far its reply had come by then."""

    status: CallStatus
    reply: Reply | None
    answer: Answer | None


class Recorded(msgspec.Struct, frozen=True):
    """Hold a call's capture, None if it could not be made; and the future of its being durable."""

    capture: CapturedCall | None
    on_disk: "asyncio.Future[bool]"


class CallRecorder:
    """Make the records of one worker's calls, and remember what later calls may repeat."""

    def __init__(self, recorder: Recorder, stitches: CallMemory, router: CallRouter) -> None:
        """Store the way to the disk, the memory of calls, and who knows a call's upstream."""
        self._recorder = recorder
        self._stitches = stitches
        self._router = router

    def record(
        self,
        arrived: Arrived,
        asked: CallIdentity,
        routed: Routed,
        answered: Answered,
        usage: Usage | None = None,
    ) -> Recorded:
        """Hand a call's record to the recorder; if it cannot be made, count it as lost.

        `usage` is what the client's key uses, to which the call's tokens are added.
        """
        capture = None
        try:
            summary, provided = self._summary_and_provided(arrived, asked, answered)
            capture = self._captured(arrived, asked, routed, answered, provided)
            if usage is not None and usage.counts_tokens:
                _spend(usage, capture)
            return Recorded(
                capture, self._recorder.take(capture, arrived.name, summary.response_id)
            )
        except Exception:
            log.exception("record_not_made", call=arrived.name)
            return Recorded(capture, self._recorder.lose(asked.identity.episode))

    def _captured(
        self,
        arrived: Arrived,
        asked: CallIdentity,
        routed: Routed,
        answered: Answered,
        provided: tuple[bytes, ...],
    ) -> CapturedCall:
        from_upstream, answer = answered.reply, answered.answer
        reply, deflated = (b"", False) if answer is None else answer.tape.take()
        identity, serving = asked.identity, routed.serving
        defaults = self._router.sampling_defaults(arrived, serving)
        return CapturedCall(
            id=arrived.id,
            episode=identity.episode,
            method=identity.method,
            confidence=identity.confidence,
            agent=identity.agent,
            task=identity.task,
            dialect=arrived.format.name,
            policy=serving.policy,
            policy_version=serving.version,
            served_model=serving.served_name,
            wanted_ids=bool(routed.request.injected),
            status=answered.status,
            http_status=None if from_upstream is None else from_upstream.status,
            streamed=_came_in_events(answered),
            request=arrived.request.body,
            reply=reply,
            deflated=deflated,
            provides=provided,
            needs=identity.needs,
            retry_of=None if identity.retry_of is None else identity.retry_of.bytes,
            retry=identity.retry,
            tool_events=asked.tool_events,
            default_temperature=defaults.temperature,
            started_at=arrived.started_at,
            first_chunk_ms=None if answer is None else answer.first_chunk_ms,
            total_ms=(perf_counter() - arrived.at) * 1000,
            sampling_defaults=defaults.others,
            split=identity.split,
            tool_grammars=defaults.tool_grammars,
            explored=routed.explored,
            tool_tag=defaults.tool_tag,
            arm=serving.arm,
            api_key=arrived.exchange.api_key,
        )

    def _summary_and_provided(
        self, arrived: Arrived, asked: CallIdentity, answered: Answered
    ) -> tuple[ReplySummary, tuple[bytes, ...]]:
        """Return the reply's summary and the call's fingerprints, or empty ones if that fails."""
        try:
            parser = None if answered.answer is None else answered.answer.parser
            summary = ReplySummary() if parser is None else parser.summary()
            return summary, self._offer(arrived, asked, answered, summary)
        except Exception:
            log.exception("offers_not_read", call=arrived.name)
            return ReplySummary(), ()

    def _offer(
        self, arrived: Arrived, asked: CallIdentity, answered: Answered, summary: ReplySummary
    ) -> tuple[bytes, ...]:
        """Register what a later call may repeat of this one, and return its fingerprints.

        This happens before the reply's end leaves: the client's next call may follow at once.
        """
        stitches, identity, request = self._stitches, asked.identity, arrived.request
        fingerprints = provided_fingerprints(
            arrived.format.turns, request.fields, summary, identity.conversation
        )
        tenant = arrived.exchange.tenant
        provided = fingerprints if tenant == DEFAULT else own_digests(tenant, fingerprints)
        stitches.provide(provided, identity.episode, identity.follows)
        got_reply = answered.reply is not None and answered.reply.status < ERRORS
        if not got_reply or answered.status != "complete":
            stitches.failed(request.body, identity.episode, UUID(bytes=arrived.id), identity.split)
        return provided


def _spend(usage: Usage, capture: CapturedCall) -> None:
    """Add a call's tokens to what its key uses; if they cannot be counted, it is recorded anyway.

    This happens before the reply's end leaves: the client's next request may follow at once.
    """
    try:
        used = tokens_of(
            capture.request,
            capture.reply,
            deflated=capture.deflated,
            refused=(capture.http_status or ERRORS) >= ERRORS,
        )
        usage.spend(monotonic(), used)
    except Exception:
        log.exception("tokens_not_counted")


def _came_in_events(answered: Answered) -> bool:
    if answered.answer is not None:
        return answered.answer.streamed
    return answered.reply is not None and comes_in_events(answered.reply)


def note_call(record: CapturedCall, arrived: Arrived, asked: CallIdentity) -> None:
    """Count a call, of which `record` is the capture, and log its line."""
    stream = "true" if record.streamed else "false"
    version = "" if record.policy_version is None else str(record.policy_version)
    labelled(CALLS, record.policy or "", version, record.status, stream).inc()
    labelled(CALL_SECONDS, stream).observe(record.total_ms / 1000)
    if record.explored is not None:
        for kind in record.explored:
            labelled(EXPLORED, record.policy or "", kind).inc()
    first, tenant = record.first_chunk_ms, arrived.exchange.tenant
    # A line without a tenant is the default tenant's: most proxies have no other.
    whose = {} if tenant == DEFAULT else {"tenant": tenant}
    log.info(
        "call",
        call=arrived.name,
        episode=asked.identity.name,
        method=record.method,
        agent=record.agent,
        model=arrived.request.model,
        served=record.served_model,
        status=record.status,
        http_status=record.http_status,
        stream=record.streamed,
        first_chunk_ms=None if first is None else round(first, 1),
        total_ms=round(record.total_ms, 1),
        ids=record.wanted_ids,
        bytes=len(record.request) + len(record.reply),
        retry=record.retry,
        warnings=len(asked.warnings),
        **whose,
    )
