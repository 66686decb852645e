"""Merge the deltas of a completion's chunks into one message (pure)."""

from typing import Any, Final

# These strings come whole; all others come in pieces.
WHOLE_STRINGS: Final = frozenset({"role", "id", "type", "name"})


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add one delta to `message`, in place.

    Strings are appended, lists whose members have an `index` are merged by it, and anything else is
    replaced.
    """
    for name, value in delta.items():
        known = message.get(name)
        if value is None:
            message.setdefault(name, None)
        elif isinstance(value, str) and isinstance(known, str) and name not in WHOLE_STRINGS:
            message[name] = known + value
        elif isinstance(value, dict) and isinstance(known, dict):
            merge_delta(known, value)
        elif isinstance(value, list) and all(_indexed(member) for member in value):
            message[name] = _merge_indexed(known or [], value)
        else:
            message[name] = value


def _indexed(member: object) -> bool:
    return isinstance(member, dict) and isinstance(member.get("index"), int)


def _merge_indexed(
    known: list[dict[str, Any]], pieces: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    by_index = {member["index"]: member for member in known}
    for piece in pieces:
        merge_delta(by_index.setdefault(piece["index"], {}), piece)
    return [by_index[index] for index in sorted(by_index)]
