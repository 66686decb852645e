"""Texts as PostgreSQL can keep them (pure): what a client or a server said must not stop a record.

A text column takes no U+0000 and no half of a surrogate pair, and an index no row of more than
2,704 bytes. What has such a character is written with its escape in its place; the request and
the reply themselves are kept as bytes, and so as they were said.
"""

from typing import Final

import msgspec

from store.records import CallRecord, ToolEvent

# An id that is longer is nobody's to name: feedback takes no longer one either.
MAX_INDEXED_BYTES: Final = 2048


def storable_text(value: str) -> str:
    """`value` with escapes for the characters that no text column takes."""
    if value.isascii():
        return value.replace("\x00", "\\u0000")
    return value.replace("\x00", "\\u0000").encode(errors="backslashreplace").decode()


def storable_call(call: CallRecord) -> CallRecord:
    """The record with texts that can all be stored; itself where they can be already."""
    fields: dict[str, str | None] = {
        "episode": call.episode,
        "agent": call.agent,
        "task": call.task,
        "policy": call.policy,
        "served_model": call.served_model,
        "response_id": call.response_id,
        "finish": call.finish,
    }
    changed: dict[str, object] = {
        name: storable_text(value)
        for name, value in fields.items()
        if value is not None and not _is_storable(value)
    }
    response_id = changed.get("response_id", call.response_id)
    if isinstance(response_id, str) and len(response_id.encode()) > MAX_INDEXED_BYTES:
        changed["response_id"] = None
    events = tuple(map(storable_event, call.tool_events))
    if any(new is not old for new, old in zip(events, call.tool_events, strict=True)):
        changed["tool_events"] = events
    return msgspec.structs.replace(call, **changed) if changed else call


def storable_event(event: ToolEvent) -> ToolEvent:
    """The event with texts that can all be stored; itself where they can be already."""
    changed = {
        name: storable_text(value)
        for name, value in (
            ("tool_id", event.tool_id),
            ("name", event.name),
            ("detail", event.detail),
        )
        if value is not None and not _is_storable(value)
    }
    return msgspec.structs.replace(event, **changed) if changed else event


def _is_storable(value: str) -> bool:
    if "\x00" in value:
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
