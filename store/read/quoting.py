"""Find the reply whose text was executed as a tool call that no reply asked for (pure).

An agent may execute a text that a model wrote in code of its own, and tell the next model about it
as a tool call that nobody made. The result is then about the reply whose whole text is one of that
call's arguments, if exactly one earlier reply of the episode is
(docs/decisions/019-tool-event-sources.md).
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from store.ids import time_of
from store.records import Record, ToolCall


class QuotedCall(Record, frozen=True, kw_only=True):
    """Name the reply whose text was executed, and what it was executed as."""

    call_id: UUID
    text_digest: UUID
    tool_id: str
    name: str

    @property
    def tool_call(self) -> ToolCall:
        """Return the tool call that the agent made of the reply; its text stands as a digest."""
        return ToolCall(id=self.tool_id, name=self.name, arguments=str(self.text_digest))


def quoted_calls(
    events: Iterable[Any], calls: Iterable[Any], requested: Container[str]
) -> Mapping[UUID, QuotedCall]:
    """Return of each event about an executed text whose text that was, by the event's id.

    An event that quotes nothing, such as a header's, is about the same text as the others of its
    tool call's id, if these are all about one.

    Args:
        events: rows of `tool_events`.
        calls: rows of `transitions`.
        requested: ids of the tool calls that replies asked for.
    """
    by_digest: dict[UUID, list[Any]] = {}
    for call in calls:
        if call.text_digest is not None:
            by_digest.setdefault(call.text_digest, []).append(call)
    made_up: dict[str, list[Any]] = {}
    for event in events:
        if event.tool_id and event.tool_id not in requested and event.asked_by is None:
            made_up.setdefault(event.tool_id, []).append(event)
    quoted: dict[UUID, QuotedCall] = {}
    for tool_id, own in made_up.items():
        quoted |= _of_one_id(tool_id, own, by_digest)
    return quoted


def _of_one_id(
    tool_id: str, events: Sequence[Any], by_digest: Mapping[UUID, Sequence[Any]]
) -> dict[UUID, QuotedCall]:
    """Return what the events of one tool call's id are about."""
    owners = {event.id: _owner(event, by_digest) for event in events if event.quotes}
    known = {owner.id: owner for owner in owners.values() if owner is not None}
    only = next(iter(known.values())) if len(known) == 1 else None
    quoted = {}
    for event in events:
        owner = owners.get(event.id, only)
        if owner is not None:
            names = [one.name for one in events if one.name and owners.get(one.id) is owner]
            quoted[event.id] = QuotedCall(
                call_id=owner.id,
                text_digest=owner.text_digest,
                tool_id=tool_id,
                name=min(names, default=""),
            )
    return quoted


def _owner(event: Any, by_digest: Mapping[UUID, Sequence[Any]]) -> Any:
    """Return the one call before the event whose text is among those that it quotes, or None."""
    spoken = [
        call
        for digest in set(event.quotes)
        for call in by_digest.get(digest, ())
        if time_of(call.id) < event.at
    ]
    return spoken[0] if len(spoken) == 1 else None
