"""Convert texts to a form that PostgreSQL can store (pure), so that no record is refused.

PostgreSQL's text columns accept neither U+0000 nor a lone surrogate, and a B-tree index accepts no
entry of more than 2,704 bytes. Such characters are replaced by their escapes. Request and reply are
kept as bytes, and so unchanged.
"""

from operator import attrgetter
from typing import Final

import msgspec

from store.records import CallRecord, ToolEvent
from store.values.call_fields import kept_fields

# A longer response id is not stored. No feedback can name it: /feedback does not accept it either.
MAX_INDEXED_BYTES: Final = 2048
# The texts of a call: those in columns of `transitions`, and those in other tables.
_TEXTS: Final = (
    *("episode", "task"),
    *(field.name for field in kept_fields(CallRecord) if field.type is str),
)
_texts_of: Final = attrgetter(*_TEXTS)


def storable_text(value: str) -> str:
    """Return `value` with escapes in place of the characters that text columns do not accept."""
    if value.isascii():
        return value.replace("\x00", "\\u0000")
    return value.replace("\x00", "\\u0000").encode(errors="backslashreplace").decode()


def storable_call(call: CallRecord) -> CallRecord:
    """Return the record with storable texts, or the record itself if all of them are.

    A response id of more than `MAX_INDEXED_BYTES` bytes is replaced by None.
    """
    changed: dict[str, object] = {
        name: storable_text(value)
        for name, value in zip(_TEXTS, _texts_of(call), strict=True)
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
    """Return the event with storable texts, or the event itself if all of them are."""
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
