"""Episodes as they were recorded: read for the trainer's claims and for `pawl export`."""

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row, Text, cast, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import Episode, Feedback, Tokens, ToolCall, ToolEvent, TransitionRow
from store.tables import episodes, feedback, tool_events, transitions

BATCH = 200


async def episode_ids(
    connection: AsyncConnection,
    *,
    since: datetime | None = None,
    agent: str | None = None,
    policy: str | None = None,
) -> list[UUID]:
    """Ids of the episodes that match, oldest first.

    `since` is compared with an episode's last call; `agent` and `policy` with its calls.
    """
    query = select(episodes.c.id).order_by(episodes.c.first_call_id)
    if since is not None:
        query = query.where(episodes.c.last_call_at >= since)
    for column, wanted in (("agent", agent), ("policy", policy)):
        if wanted is not None:
            matching = select(transitions.c.episode_id).where(transitions.c[column] == wanted)
            query = query.where(episodes.c.id.in_(matching))
    return list((await connection.execute(query)).scalars())


async def iter_episodes(connection: AsyncConnection, ids: Sequence[UUID]) -> AsyncIterator[Episode]:
    """The episodes of `ids`, in that order, read in batches."""
    for start in range(0, len(ids), BATCH):
        for episode in await read_episodes(connection, ids[start : start + BATCH]):
            yield episode


async def read_episodes(connection: AsyncConnection, ids: Sequence[UUID]) -> list[Episode]:
    """The episodes of `ids`, in that order, each with its calls, events and feedback."""
    wanted = list(ids)
    heads = await connection.execute(select(episodes).where(episodes.c.id.in_(wanted)))
    calls = await _rows(connection, _CALLS.where(transitions.c.episode_id.in_(wanted)))
    events = await _rows(connection, _EVENTS.where(tool_events.c.episode_id.in_(wanted)))
    said = await _rows(connection, _FEEDBACK.where(feedback.c.episode_id.in_(wanted)))
    found = {
        head.id: _episode(
            head,
            _of(calls, head.id),
            _newest_events(_of(events, head.id)),
            _of(said, head.id),
        )
        for head in heads
    }
    return [found[episode_id] for episode_id in wanted if episode_id in found]


_CALLS = select(
    *[
        column
        for column in transitions.c
        if column.name not in ("request", "reply", "request_raw", "reply_raw")
    ],
    cast(transitions.c.request, Text).label("request"),
    cast(transitions.c.reply, Text).label("reply"),
).order_by(transitions.c.id)
_EVENTS = select(tool_events).order_by(tool_events.c.at, tool_events.c.id)
_FEEDBACK = select(feedback).order_by(feedback.c.at, feedback.c.id)


async def _rows(connection: AsyncConnection, query: Any) -> Sequence[Row[Any]]:
    return (await connection.execute(query)).all()


def _of(rows: Iterable[Row[Any]], episode_id: UUID) -> list[Row[Any]]:
    return [row for row in rows if row.episode_id == episode_id]


def _newest_events(rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """The newest statement about a tool call stands; those without an id all stand."""
    standing: dict[Any, Row[Any]] = {}
    for row in rows:
        standing[row.tool_id or row.id] = row
    return list(standing.values())


def _episode(
    head: Row[Any], calls: list[Row[Any]], events: list[Row[Any]], said: list[Row[Any]]
) -> Episode:
    asked = {call["id"]: row.id for row in calls for call in row.tool_calls}
    owner = {event.id: event.asked_by or asked.get(event.tool_id) for event in events}
    known = {row.id for row in calls}
    return Episode(
        id=head.id,
        key=head.key,
        task=head.task,
        method=head.method,
        last_call_at=head.last_call_at,
        calls=tuple(
            _transition(
                row,
                [event for event in events if owner[event.id] == row.id],
                [statement for statement in said if statement.call_id == row.id],
            )
            for row in calls
        ),
        feedback=tuple(_statement(row) for row in said if row.call_id is None),
        stray_tool_events=tuple(_event(row) for row in events if owner[row.id] not in known),
    )


def _transition(row: Row[Any], events: list[Row[Any]], said: list[Row[Any]]) -> TransitionRow:
    return TransitionRow(
        id=row.id,
        episode_id=row.episode_id,
        agent=row.agent,
        policy=row.policy,
        policy_version=row.policy_version,
        status=row.status,
        http_status=row.http_status,
        request=_raw(row.request),
        reply=_raw(row.reply),
        tokens=Tokens(
            prompt_ids=row.prompt_ids,
            sampled_ids=row.sampled_ids,
            sampled_logprobs=row.sampled_logprobs,
        ),
        sampling=row.sampling,
        trainable=row.trainable,
        reason=row.reason,
        tool_calls=tuple(msgspec.convert(call, ToolCall) for call in row.tool_calls),
        tool_events=tuple(_event(event) for event in events),
        feedback=tuple(_statement(statement) for statement in said),
    )


def _raw(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _event(row: Row[Any]) -> ToolEvent:
    return ToolEvent(
        id=row.id,
        tool_id=row.tool_id,
        name=row.name,
        status=row.status,
        detail=row.detail,
        ms=row.ms,
    )


def _statement(row: Row[Any]) -> Feedback:
    return Feedback(metric=row.metric, value=row.value, at=row.at)
