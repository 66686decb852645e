"""Derive from an episode whether it failed, its tool calls' events, and its compactions (pure)."""

from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from store.records import (
    FAILED_STATUSES,
    Episode,
    Record,
    ToolCall,
    ToolEvent,
    ToolStatus,
    TransitionRow,
)


def has_failed(episode: Episode) -> bool:
    """Return whether the upstream refused the episode's last call because of its content."""
    return bool(episode.calls) and episode.calls[-1].http_status in FAILED_STATUSES


# The kind of a side call that sums up a conversation for the one that replaces it.
COMPACTION: Final = "compaction"


def compacted_by(calls: Iterable[Any]) -> dict[UUID, UUID]:
    """Return, by the first call of each compacted conversation, the call that compacted it.

    `calls` are an episode's in order: `CallFacts`, or rows with its columns. The compacted
    conversation begins with the next call of work in the same lane.
    """
    links: dict[UUID, UUID] = {}
    waiting: dict[tuple[str, str | None], UUID] = {}
    for call in calls:
        lane = call.agent, call.lane
        if call.side is None and lane in waiting:
            links[call.id] = waiting.pop(lane)
        elif call.side == COMPACTION and call.status == "complete" and call.http_status == 200:
            waiting[lane] = call.id
    return links


class MatchedEvent(Record, frozen=True, kw_only=True):
    """A tool event with the tool call that it belongs to.

    `arguments` is None if there is no tool call, because the reply was malformed.
    """

    id: str | None
    tool: str | None
    arguments: str | None
    status: ToolStatus


def matched_events(call: TransitionRow) -> tuple[MatchedEvent, ...]:
    """Return a call's tool events that belong to one of its tool calls."""
    matches = [match_event(event, call.tool_calls) for event in call.tool_events]
    return tuple(event for event in matches if event is not None)


def match_event(event: ToolEvent, tool_calls: Sequence[ToolCall]) -> MatchedEvent | None:
    """Return an event with its tool call, or None if no tool call matches.

    A `malformed` event without an id matches without a tool call: it is about a reply that the
    server's parser could not read as a tool call.
    """
    tool_call = find_tool_call(event, tool_calls)
    if tool_call is not None:
        return MatchedEvent(
            id=tool_call.id,
            tool=event.name or tool_call.name,
            arguments=tool_call.arguments,
            status=event.status,
        )
    if event.tool_id is None and event.status == "malformed":
        return MatchedEvent(id=None, tool=event.name, arguments=None, status=event.status)
    return None


def find_tool_call(event: ToolEvent, tool_calls: Sequence[ToolCall]) -> ToolCall | None:
    """Return the tool call that an event is about: by its id, else the only one of its name."""
    if event.tool_id is not None:
        return next((call for call in tool_calls if call.id == event.tool_id), None)
    candidates = [call for call in tool_calls if event.name in (None, call.name)]
    return candidates[0] if len(candidates) == 1 else None
