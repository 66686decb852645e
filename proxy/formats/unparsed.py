"""Remove members from JSON that cannot be parsed, or whose shape is not the API's (pure).

A lone surrogate, NaN, bytes that are not UTF-8, an object that is cut off or has something beside
it: Python represents none of these, and a client must get them as they came, without what it did
not ask for. So members are found by their names, wherever they stand: in such a reply nobody can
tell for sure which object a member belongs to. A model's text is never touched, because the quotes
of a name within a string are escaped.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

OPENS: Final = b"{["
NUMBER: Final = b"-0123456789"
# A string that is cut off reaches to the end of the data.
STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
BRACKET: Final = re.compile(STRING + rb"|[{}\[\]]", re.DOTALL)
SCALAR: Final = re.compile(STRING + rb"|[^,\]}\s]*", re.DOTALL)
NO_CONTENT: Final = re.compile(rb"\[\s*\]")


class JsonMember(msgspec.Struct, frozen=True):
    """Name a member to replace by `instead`, where its value begins with one of the bytes `opens`.

    With `only`, just a value equal to that is replaced; with `unless_empty`, no empty list.
    """

    opens: bytes
    instead: bytes = b"null"
    only: bytes | None = None
    unless_empty: bool = False


def without(data: bytes, members: Mapping[bytes, JsonMember]) -> bytes:
    """Return `data` with the values of `members` replaced, and every other byte unchanged."""
    if not any(name in data for name in members):
        return data
    key = re.compile(rb'"(%b)"\s*:\s*' % b"|".join(map(re.escape, members)))
    pieces, kept, at = [], 0, 0
    while (match := key.search(data, at)) is not None:
        at = match.end()
        member = members[match[1]]
        end = _end_of(data, at, member)
        if end is not None:
            pieces += [data[kept:at], member.instead]
            kept = at = end
    return b"".join([*pieces, data[kept:]]) if pieces else data


def _end_of(data: bytes, at: int, member: JsonMember) -> int | None:
    """Return where a member's value ends, or None if it is not to be replaced."""
    sign = data[at : at + 1]
    if not sign or sign not in member.opens:
        return None
    if sign in OPENS:
        empty = member.unless_empty and NO_CONTENT.match(data, at) is not None
        return None if empty else _end_of_container(data, at)
    match = SCALAR.match(data, at)
    end = len(data) if match is None else match.end()
    return end if member.only is None or data[at:end] == member.only else None


def _end_of_container(data: bytes, at: int) -> int:
    """Return where a container's closing bracket ends, or the data's end if it is cut off."""
    depth = 0
    while (token := BRACKET.search(data, at)) is not None:
        at = token.end()
        sign = token[0]
        if not sign.startswith(b'"'):
            depth += 1 if sign in OPENS else -1
        if depth == 0:
            return at
    return len(data)
