"""From spooled records to rows, in one transaction a batch.

Order-free and repeatable (DESIGN §3.5): every row carries the id it was born with, an
episode's fields are merged by rules that do not depend on what came first, and feedback
whose target is not there yet is matched whenever it arrives.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import new_id, time_of
from store.partitions import days_of, ensure_partition
from store.records import (
    REWARD,
    CallRecord,
    FeedbackItem,
    FeedbackRecord,
    SpoolRecord,
    ToolEvent,
)
from store.tables import feedback, feedback_requests, tool_events, transitions

OWN_EPISODE = "own"


def derived_task(record: CallRecord) -> str | None:
    """The task of an episode that names none: what its first call asked, to the token.

    None where the upstream gave no ids: such an episode has nobody to be compared with.
    """
    if not record.tokens.prompt_ids:
        return None
    return "prompt:" + sha256(record.tokens.prompt_ids).hexdigest()[:32]


async def ingest(connection: AsyncConnection, records: Sequence[SpoolRecord]) -> None:
    """Store `records`, all or none; those that are stored already change nothing.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: the database is away, or refuses a record.
    """
    calls = [record for record in records if isinstance(record, CallRecord)]
    statements = [record for record in records if isinstance(record, FeedbackRecord)]
    if calls:
        await _insert_calls(connection, calls)
    for record in statements:
        await _insert_feedback(connection, record)
    await match_pending(connection)


async def _insert_calls(connection: AsyncConnection, calls: Sequence[CallRecord]) -> None:
    for day in days_of(call.id for call in calls):
        await ensure_partition(connection, day)
    episode_ids = await _upsert_episodes(connection, calls)
    rows = [_transition_row(call, episode_ids[call.episode]) for call in calls]
    await connection.execute(
        insert(transitions).on_conflict_do_nothing(index_elements=["id"]), rows
    )
    events = [
        _event_row(event, time_of(call.id), "header", episode_id=episode_ids[call.episode])
        for call in calls
        for event in call.tool_events
    ]
    if events:
        await connection.execute(
            insert(tool_events).on_conflict_do_nothing(index_elements=["id"]), events
        )


# A named task beats a derived one; among equals the earliest call's counts, and so for
# the policy: whatever the order of arrival, the outcome is the same.
_TAKES_TASK = (
    "(excluded.task_named AND NOT episodes.task_named)"
    " OR (excluded.task_named = episodes.task_named AND excluded.task IS NOT NULL"
    " AND (episodes.task IS NULL OR excluded.first_call_id < episodes.first_call_id))"
)
_IS_EARLIER = "excluded.first_call_id < episodes.first_call_id"
_UPSERT_EPISODES = text(
    f"""
    INSERT INTO episodes (id, key, method, task, task_named, policy, policy_version,
                          first_call_id, last_call_at)
    SELECT * FROM unnest(
        CAST(:id AS uuid[]), CAST(:key AS text[]), CAST(:method AS text[]),
        CAST(:task AS text[]), CAST(:task_named AS boolean[]), CAST(:policy AS text[]),
        CAST(:policy_version AS integer[]), CAST(:first_call_id AS uuid[]),
        CAST(:last_call_at AS timestamptz[]))
    ON CONFLICT (key) DO UPDATE SET
        last_call_at = GREATEST(episodes.last_call_at, excluded.last_call_at),
        first_call_id = LEAST(episodes.first_call_id, excluded.first_call_id),
        task = CASE WHEN {_TAKES_TASK} THEN excluded.task ELSE episodes.task END,
        task_named = episodes.task_named OR excluded.task_named,
        policy = CASE WHEN {_IS_EARLIER} THEN excluded.policy ELSE episodes.policy END,
        policy_version = CASE WHEN {_IS_EARLIER} THEN excluded.policy_version
                         ELSE episodes.policy_version END
    RETURNING key, id
    """
)


async def _upsert_episodes(
    connection: AsyncConnection, calls: Sequence[CallRecord]
) -> dict[str, UUID]:
    """Merge the calls into their episodes, in the order of keys: no two drainers deadlock."""
    by_key: dict[str, list[CallRecord]] = {}
    for call in sorted(calls, key=lambda call: (call.episode, call.id)):
        by_key.setdefault(call.episode, []).append(call)
    rows = [episode_row(members) for members in by_key.values()]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    stored = await connection.execute(_UPSERT_EPISODES, columns)
    return {row.key: row.id for row in stored}


def episode_row(calls: Sequence[CallRecord]) -> dict[str, Any]:
    """What one batch's calls, earliest first, say of their episode: the rules above (pure)."""
    first = calls[0]
    named = next((call.task for call in calls if call.task is not None), None)
    derived = next((task for task in map(derived_task, calls) if task is not None), None)
    return {
        "id": new_id(),
        "key": first.episode,
        "method": first.method,
        "task": named if named is not None else derived,
        "task_named": named is not None,
        "policy": first.policy,
        "policy_version": first.policy_version,
        "first_call_id": first.id,
        "last_call_at": max(call.started_at for call in calls),
    }


def _raw(json_text: bytes | None) -> msgspec.Raw | None:
    return None if json_text is None else msgspec.Raw(json_text)


def _transition_row(call: CallRecord, episode_id: UUID) -> dict[str, Any]:
    return {
        "id": call.id,
        "episode_id": episode_id,
        "agent": call.agent,
        "dialect": call.dialect,
        "policy": call.policy,
        "policy_version": call.policy_version,
        "served_model": call.served_model,
        "status": call.status,
        "http_status": call.http_status,
        "stream": call.stream,
        "request": _raw(call.request),
        "request_raw": call.request_raw,
        "reply": _raw(call.reply),
        "reply_raw": call.reply_raw,
        "response_id": call.response_id,
        "prompt_ids": call.tokens.prompt_ids,
        "sampled_ids": call.tokens.sampled_ids,
        "sampled_logprobs": call.tokens.sampled_logprobs,
        "sampling": _raw(call.sampling),
        "trainable": call.trainable,
        "reason": call.reason,
        "tool_calls": call.tool_calls,
        "usage": _raw(call.usage),
        "finish": call.finish,
        "started_at": call.started_at,
        "first_chunk_ms": call.first_chunk_ms,
        "total_ms": call.total_ms,
        "retry": call.retry,
    }


def _event_row(
    event: ToolEvent,
    at: datetime,
    source: str,
    *,
    episode_id: UUID | None = None,
    item: FeedbackItem | None = None,
) -> dict[str, Any]:
    return {
        "id": event.id,
        "episode_id": episode_id,
        "target_kind": item.target_kind if item else None,
        "target": item.target if item else None,
        "tool_id": event.tool_id,
        "name": event.name,
        "status": event.status,
        "detail": event.detail,
        "ms": event.ms,
        "source": source,
        "at": at,
    }


async def _insert_feedback(connection: AsyncConnection, record: FeedbackRecord) -> None:
    """One POST's statements; a repeat under the same idempotency key states nothing new."""
    inserted = await connection.execute(
        insert(feedback_requests)
        .values(
            id=record.id,
            idempotency_key=record.idempotency_key,
            body_hash=record.body_hash,
            at=record.at,
        )
        .on_conflict_do_nothing()
        .returning(feedback_requests.c.id)
    )
    if inserted.first() is None:
        return
    values = [_feedback_row(item, record) for item in record.items if item.tool is None]
    if values:
        await connection.execute(insert(feedback), values)
    events = [
        _event_row(item.tool, record.at, "feedback", item=item)
        for item in record.items
        if item.tool is not None
    ]
    if events:
        await connection.execute(insert(tool_events), events)


def _feedback_row(item: FeedbackItem, record: FeedbackRecord) -> dict[str, Any]:
    return {
        "id": item.id,
        "metric": item.metric,
        "value": item.value,
        "target_kind": item.target_kind,
        "target": item.target,
        "request_id": record.id,
        "at": record.at,
    }


_TARGETS = {
    "episode": "episodes e WHERE f.target_kind = 'episode' AND e.key = f.target",
    "response": "transitions t JOIN episodes e ON e.id = t.episode_id"
    " WHERE f.target_kind = 'response' AND t.response_id = f.target",
    # Only a call's target is a UUID; CASE keeps the cast from seeing the others.
    "call": "transitions t JOIN episodes e ON e.id = t.episode_id WHERE f.target_kind = 'call'"
    " AND t.id = CASE WHEN f.target_kind = 'call' THEN f.target::uuid END",
}


async def match_pending(connection: AsyncConnection) -> None:
    """Tie feedback and tool events to targets that have arrived, and mark what is scored.

    An episode of its own is its one call: what is said of the call is said of the episode.
    """
    for kind, source in _TARGETS.items():
        call = "NULL::uuid" if kind == "episode" else "t.id"
        about = f"CASE WHEN e.method = '{OWN_EPISODE}' THEN NULL ELSE {call} END"
        await connection.execute(
            text(
                f"""
                WITH matched AS (
                    UPDATE feedback f SET episode_id = e.id, call_id = {about}
                    FROM {source} AND f.episode_id IS NULL
                    RETURNING f.episode_id, f.call_id, f.metric, f.at)
                UPDATE episodes SET scored_at = scored.at
                FROM (SELECT episode_id, min(at) AS at FROM matched
                      WHERE metric = '{REWARD}' AND call_id IS NULL GROUP BY 1) scored
                WHERE episodes.id = scored.episode_id AND episodes.scored_at IS NULL
                """
            )
        )
        await connection.execute(
            text(
                f"UPDATE tool_events f SET episode_id = e.id, asked_by = {call}"
                f" FROM {source} AND f.episode_id IS NULL"
            )
        )


async def known_targets(
    connection: AsyncConnection, targets: Iterable[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Which of these (kind, target) pairs are stored already."""
    found: set[tuple[str, str]] = set()
    queries = {
        "episode": "SELECT key FROM episodes WHERE key = ANY(:wanted)",
        "response": "SELECT response_id FROM transitions WHERE response_id = ANY(:wanted)",
        "call": "SELECT id::text FROM transitions WHERE id = ANY(CAST(:wanted AS uuid[]))",
    }
    by_kind: dict[str, list[str]] = {}
    for kind, target in targets:
        by_kind.setdefault(kind, []).append(target)
    for kind, wanted in by_kind.items():
        rows = await connection.execute(text(queries[kind]), {"wanted": wanted})
        found.update((kind, row[0]) for row in rows)
    return found


async def body_hash_of(connection: AsyncConnection, idempotency_key: str) -> str | None:
    """The hash of the body that was stored under this key, if any was."""
    query = select(feedback_requests.c.body_hash).where(
        feedback_requests.c.idempotency_key == idempotency_key
    )
    return (await connection.execute(query)).scalar()
