"""Makes a finished call durable and counts it: exactly one of stored, spooled, dead, dropped."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import structlog

from proxy.dialects.base import ModelRequest, ReplyFacts
from proxy.identity import Identity
from proxy.metrics import DROPPED, NOT_TRAINABLE, RECORDED, SPOOLED, TOKENS, TOOL_STATUS
from proxy.recent import Recent
from proxy.spool import Spool
from proxy.trainable import Sampled, sampling_settings, why_not_trainable
from proxy.versions import Serving
from store.records import CallRecord, CallStatus, SpoolRecord, Tokens, ToolEvent
from store.tokens import pack_ids, pack_logprobs

log = structlog.get_logger()


class Outcome(msgspec.Struct, frozen=True):
    """How a call ended, beside what its reply said."""

    status: CallStatus
    http_status: int | None
    started_at: datetime
    first_chunk_ms: float | None
    total_ms: float
    raw_reply: bytes | None


class Recorder:
    """Turns what the relay saw into a record, and waits until it is on disk."""

    def __init__(self, spool: Spool, recent: Recent, *, default_temperature: float) -> None:
        self._spool = spool
        self._recent = recent
        self._default_temperature = default_temperature

    async def record_call(self, record: CallRecord) -> bool:
        """Whether the call is durable; a call that is not is counted and logged as dropped."""
        durable = await self.append(record)
        if durable:
            self._recent.remember_call(record)
        policy = record.policy or ""
        TOKENS.labels(policy, "prompt").inc(len(record.tokens.prompt_ids) // 4)
        TOKENS.labels(policy, "sampled").inc(len(record.tokens.sampled_ids) // 4)
        if record.reason is not None:
            NOT_TRAINABLE.labels(record.reason).inc()
        for event in record.tool_events:
            TOOL_STATUS.labels(event.status).inc()
        return durable

    async def append(self, record: SpoolRecord) -> bool:
        """Put any record into the spool; False where the disk refused it."""
        RECORDED.inc()
        try:
            await self._spool.append(record)
        except OSError as error:
            DROPPED.inc()
            log.error("record_dropped", record=str(record.id), reason=str(error))
            return False
        SPOOLED.inc()
        return True

    def make_record(
        self,
        call_id: UUID,
        dialect: str,
        identity: Identity,
        serving: Serving,
        request: ModelRequest,
        facts: ReplyFacts,
        outcome: Outcome,
        tool_events: tuple[ToolEvent, ...],
        retry: int,
    ) -> CallRecord:
        """The record of a call, `request` as the client sent it; pure but for the settings."""
        sampling = sampling_settings(request.fields, self._default_temperature)
        strict = _has_strict_tools(request.fields)
        reason = why_not_trainable(
            outcome.status, outcome.http_status, serving.version, sampling, strict, facts.sampled
        )
        return CallRecord(
            id=call_id,
            episode=identity.episode,
            method=identity.method,
            agent=identity.agent,
            task=identity.task,
            dialect=dialect,
            policy=serving.policy,
            policy_version=serving.version,
            served_model=serving.served_name,
            status=outcome.status,
            http_status=outcome.http_status,
            stream=request.stream,
            request=None if request.parsed is None else request.body,
            request_raw=request.body if request.parsed is None else None,
            reply=facts.reply,
            reply_raw=outcome.raw_reply if facts.reply is None else None,
            response_id=facts.response_id,
            tokens=_tokens(facts.sampled),
            sampling=msgspec.json.encode(sampling),
            trainable=reason is None,
            reason=reason,
            tool_calls=facts.tool_calls,
            tool_events=tool_events,
            usage=None if facts.usage is None else msgspec.json.encode(facts.usage),
            finish=facts.finish,
            started_at=outcome.started_at,
            first_chunk_ms=outcome.first_chunk_ms,
            total_ms=outcome.total_ms,
            retry=retry,
        )


def _tokens(sampled: Sampled) -> Tokens:
    return Tokens(
        prompt_ids=pack_ids(sampled.prompt_ids or ()),
        sampled_ids=pack_ids(sampled.sampled_ids or ()),
        sampled_logprobs=pack_logprobs(sampled.sampled_logprobs or ()),
    )


def _has_strict_tools(fields: dict[str, Any]) -> bool:
    """vLLM holds strict tools to their schema by a grammar: another distribution."""
    tools = fields.get("tools")
    return isinstance(tools, list) and any(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and tool["function"].get("strict") is True
        for tool in tools
    )
