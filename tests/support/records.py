"""Make records for tests: whole by default, and any field otherwise."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import msgspec

from proxy.spool.segments import CapturedCall
from store.ids import lowest_id_at, new_id
from store.records import CallRecord, FeedbackItem, FeedbackRecord, Tokens, ToolEvent
from store.values.packing import pack_ids, pack_logprobs

REPLY = (
    b'{"id":"r","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},'
    b'"logprobs":{"content":[{"logprob":-0.5},{"logprob":-1.5}]},"finish_reason":"stop",'
    b'"token_ids":[4,5]}],"usage":{"completion_tokens":2},"prompt_token_ids":[1,2,3]}'
)
START = datetime(2026, 1, 1, 12, tzinfo=UTC)


def tokens(prompt: list[int], sampled: list[int], logprob: float = -1.0) -> Tokens:
    """Pack ids with the same log-probability everywhere."""
    return Tokens(
        prompt_ids=pack_ids(prompt),
        sampled_ids=pack_ids(sampled),
        sampled_logprobs=pack_logprobs([logprob] * len(sampled)),
    )


def call(episode: str = "e1", **changes: Any) -> CallRecord:
    """Make a complete, trainable call."""
    record = CallRecord(
        id=new_id(),
        episode=episode,
        method="header",
        agent="default",
        task=None,
        dialect="chat",
        policy="m",
        policy_version=0,
        served_model="m",
        status="complete",
        http_status=200,
        stream=False,
        request=b'{"model":"m"}',
        request_raw=None,
        reply=b'{"id":"r"}',
        reply_raw=None,
        response_id=None,
        tokens=tokens([1, 2, 3], [4, 5]),
        sampling=b'{"temperature": 1.0}',
        trainable=True,
        reason=None,
        tool_calls=(),
        tool_events=(),
        usage=None,
        finish="stop",
        started_at=datetime.now(UTC),
        first_chunk_ms=1.0,
        total_ms=2.0,
        retry=0,
    )
    return msgspec.structs.replace(record, **changes)


def ago(seconds: float, number: int = 0) -> dict[str, Any]:
    """Return fields of a call that began `seconds` ago; `number` tells those of a time apart."""
    began = datetime.now(UTC) - timedelta(seconds=seconds)
    return {"id": UUID(int=lowest_id_at(began).int + number), "started_at": began}


def captured(episode: str = "e1", **changes: Any) -> CapturedCall:
    """Make a whole call as a worker writes it down."""
    record = CapturedCall(
        id=new_id().bytes,
        episode=episode,
        method="header",
        confidence="certain",
        agent="default",
        task=None,
        dialect="chat",
        policy="m",
        policy_version=0,
        served_model="m",
        wanted_ids=True,
        status="complete",
        http_status=200,
        streamed=False,
        request=b'{"model":"m","messages":[]}',
        reply=REPLY,
        deflated=False,
        provides=(),
        needs=(),
        retry_of=None,
        retry=0,
        tool_events=(),
        default_temperature=1.0,
        started_at=START.timestamp(),
        first_chunk_ms=1.0,
        total_ms=2.0,
    )
    return msgspec.structs.replace(record, **changes)


def reward(value: float, *, at: int = 0, key: str | None = None, **target: str) -> FeedbackRecord:
    """Make one POST with one reward; `at` in seconds after START."""
    return statement("reward", value, at=at, key=key, **target)


def statement(
    metric: str,
    value: float | str | None,
    *,
    at: int = 0,
    key: str | None = None,
    source: str | None = None,
    correction: str | None = None,
    **target: str,
) -> FeedbackRecord:
    """Make one POST with one statement about `episode=…`, `call=…` or `response=…`."""
    [(kind, name)] = target.items()
    item = msgspec.convert(
        {
            "id": new_id(),
            "metric": metric,
            "value": value,
            "target_kind": kind,
            "target": name,
            "source": source,
            "correction": correction,
        },
        FeedbackItem,
    )
    return FeedbackRecord(
        id=new_id(),
        at=START + timedelta(seconds=at),
        items=(item,),
        idempotency_key=key,
        body_hash=None if key is None else "hash",
    )


def tool_event(status: str, tool_id: str | None, event_id: UUID | None = None) -> ToolEvent:
    """Make an event about a tool call; the id of one does not tell its time."""
    return msgspec.convert(
        {"id": event_id or uuid4(), "tool_id": tool_id, "name": "tool", "status": status},
        ToolEvent,
    )
