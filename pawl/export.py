"""`pawl export`: what was recorded, as JSON lines, one episode each, oldest first."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import IO, Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from store.documents import compact
from store.errors import Damaged
from store.reading import episode_ids, read_in_batches
from store.records import (
    REWARD,
    Episode,
    EpisodeState,
    Feedback,
    Record,
    ToolEvent,
    TransitionRow,
    policy_name,
)
from store.tokens import unpack_ids, unpack_logprobs
from trainer.air import MatchedEvent, match_event, matched_events
from trainer.credit.accounts import has_failed

# An episode without a reward counts as over when it has been silent for this long.
QUIET = timedelta(minutes=10)


class Selection(Record, frozen=True, kw_only=True):
    """Which episodes: since when, and with calls of which agent and policy."""

    since: datetime | None = None
    agent: str | None = None
    policy: str | None = None


async def export(engine: AsyncEngine, selection: Selection, out: IO[bytes]) -> int:
    """Write the episodes to `out`; returns how many.

    Raises:
        Damaged: some cannot be read back, each named with its reason; all others are written.
    """
    now = datetime.now(UTC)
    count = 0
    damaged: dict[UUID, str] = {}
    async with engine.connect() as connection:
        ids = await episode_ids(
            connection,
            since=selection.since,
            agent=selection.agent,
            policy=selection.policy,
        )
        async for found in read_in_batches(connection, ids):
            damaged |= found.damaged
            for episode in found.episodes:
                try:
                    line = encoded_line(episode, now)
                except Damaged as error:
                    damaged[episode.id] = str(error)
                    continue
                out.write(line + b"\n")
                count += 1
    if damaged:
        named = "\n".join(damaged.values())
        raise Damaged(f"{named}; the other {count} episodes are written", damaged)
    return count


def episode_state(episode: Episode, now: datetime, quiet: timedelta = QUIET) -> EpisodeState:
    """Scored, failed, still open, or over without a score.

    What failed is scored by a reward for all of it alone: its other calls are paid as failed.
    """
    if _has_reward(episode.feedback):
        return "scored"
    if has_failed(episode):
        return "failed"
    if any(_has_reward(call.feedback) for call in episode.calls):
        return "scored"
    return "open" if now - episode.last_call_at < quiet else "unscored"


def _has_reward(statements: Sequence[Feedback]) -> bool:
    return any(statement.metric == REWARD for statement in statements)


def encoded_line(episode: Episode, now: datetime, quiet: timedelta = QUIET) -> bytes:
    """Return an episode as one compact JSON document, without the newline that ends it (pure).

    Raises:
        Damaged: a request or reply of it is no JSON document, or nests too deep to be read.
    """
    return msgspec.json.encode(_episode_line(episode, now, quiet))


def _episode_line(episode: Episode, now: datetime, quiet: timedelta) -> dict[str, Any]:
    line: dict[str, Any] = {
        "episode": episode.key,
        "task": episode.task,
        "state": episode_state(episode, now, quiet),
        "feedback": _statements(episode.feedback),
        "calls": [_call(episode, call) for call in episode.calls],
    }
    if stray := [*episode.stray_tool_events, *_unasked(episode.calls)]:
        # Stated of tools that no call of the episode asked for: kept, and of no effect.
        line["stray_tool_events"] = [_stray(event) for event in stray]
    if episode.quarantined_reason is not None:
        line["quarantined"] = episode.quarantined_reason
    return line


def _call(episode: Episode, call: TransitionRow) -> dict[str, Any]:
    request, reply = _document(episode, call, "request"), _document(episode, call, "reply")
    return {
        "call": str(call.id),
        "agent": call.agent,
        "policy": None
        if call.policy is None
        else policy_name(call.policy, call.policy_version or 0, call.policy),
        "request": request,
        "reply": reply,
        "prompt_ids": unpack_ids(call.tokens.prompt_ids),
        "sampled_ids": unpack_ids(call.tokens.sampled_ids),
        "sampled_logprobs": unpack_logprobs(call.tokens.sampled_logprobs),
        "trainable": call.trainable,
        "reason": call.reason,
        "tool_events": [_event(event) for event in matched_events(call)],
        "feedback": _statements(call.feedback),
    }


def _document(episode: Episode, call: TransitionRow, part: str) -> msgspec.Raw | None:
    """A text that a client or a server wrote: it must not end the line that it is put into."""
    text: bytes | None = getattr(call, part)
    if text is None:
        return None
    try:
        return msgspec.Raw(compact(text))
    except ValueError as error:
        raise Damaged(
            f"episode {episode.key!r} cannot be read back: the {part} of call {call.id}: {error}"
        ) from error


def _event(event: MatchedEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "name": event.tool,
        "status": event.status,
        "arguments": event.arguments,
    }


def _unasked(calls: Sequence[TransitionRow]) -> list[ToolEvent]:
    return [
        event
        for call in calls
        for event in call.tool_events
        if match_event(event, call.tool_calls) is None
    ]


def _stray(event: ToolEvent) -> dict[str, Any]:
    return {"id": event.tool_id, "name": event.name, "status": event.status}


def _statements(statements: Sequence[Feedback]) -> list[dict[str, Any]]:
    return [
        {"metric": said.metric, "value": said.value, "at": said.at.isoformat()}
        for said in statements
    ]
