"""Takes members out of JSON that no parser here reads (pure).

Half an emoji, NaN, bytes that are no text, an object that is cut off or stands beside something
else: Python holds none of these, and a client is to get them as they came, less what it did
not ask for. So brackets and strings are followed, and nothing else is looked at.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

BOM: Final = b"\xef\xbb\xbf"
QUOTE, COLON = b'"'[0], b":"[0]
OPENS: Final = b"{["
CLOSES: Final = b"}]"
NUMBER: Final = b"-0123456789"
# A string that is cut off goes to the end.
TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{}\[\]:]', re.DOTALL)
BRACKET: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
SCALAR: Final = re.compile(rb"[^,\]}\s]*")
BLANK: Final = re.compile(rb"\s*")
NO_CONTENT: Final = re.compile(rb"\[\s*\]")

Path = tuple[bytes | None, ...]


class Member(msgspec.Struct, frozen=True):
    """A member to be replaced: where its value begins with one of `opens`, by `instead`.

    `only`: where its value is that; `unless_empty`: not an empty list.
    """

    opens: bytes
    instead: bytes = b"null"
    only: bytes | None = None
    unless_empty: bool = False


def without(data: bytes, members: Mapping[bytes, Member], holders: frozenset[Path] | None) -> bytes:
    """Return `data` with `members` replaced, and every other byte as it is.

    `holders` are the objects that have them, each by the keys on the way to it (None in a
    list); with None any object. Where brackets do not match, or there is no object at all, they
    are replaced wherever they stand too: nobody can say then whose they are.
    """
    if not any(name in data for name in members) and b"\\u" not in data:
        return data
    spans = None if holders is None else _spans(data, members, holders)
    if spans is None:
        spans = _spans_anywhere(data, members)
    pieces, at = [], 0
    for start, end, instead in spans:
        pieces += [data[at:start], instead]
        at = end
    return b"".join([*pieces, data[at:]]) if pieces else data


Span = tuple[int, int, bytes]


def _spans(
    data: bytes, members: Mapping[bytes, Member], holders: frozenset[Path]
) -> list[Span] | None:
    """Return what is to be replaced; None where `holders` cannot be told from others."""
    found: list[Span] = []
    walk = _Walk(data)
    for key, at in walk.members():
        member = members.get(key)
        if member is None or walk.path() not in holders:
            continue
        end = _end_of(data, at, member)
        if end is not None:
            found.append((at, end, member.instead))
            walk.skip_to(end)
    return found if walk.whole else None


def _spans_anywhere(data: bytes, members: Mapping[bytes, Member]) -> list[Span]:
    """Return what is to be replaced by its name alone: within a string its quotes are escaped."""
    found: list[Span] = []
    names = b"|".join(map(re.escape, members))
    key = re.compile(rb'"(%b)"\s*:\s*' % names)
    at = 0
    while (match := key.search(data, at)) is not None:
        at = match.end()
        member = members[match[1]]
        end = _end_of(data, at, member)
        if end is not None:
            found.append((at, end, member.instead))
            at = end
    return found


class _Walk:
    """Goes from key to key, and knows in which containers it is."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[bytes | None] = []
        self._matches = data.removeprefix(BOM).lstrip().startswith(b"{")

    @property
    def whole(self) -> bool:
        """Return whether it was an object, and each bracket had its other half."""
        return self._matches and not self._stack

    def path(self) -> Path:
        """Return the keys under which the present object stands."""
        return tuple(self._stack[1:])

    def skip_to(self, at: int) -> None:
        """Go on from there."""
        self._at = at

    def members(self) -> Iterator[tuple[bytes, int]]:
        """Give each key, and where its value begins."""
        data, name = self._data, b""
        key: bytes | None = None
        while (token := TOKEN.search(data, self._at)) is not None:
            self._at = token.end()
            sign = data[token.start()]
            if sign == QUOTE:
                name, key = token[0], None
            elif sign == COLON:
                key = _read(name)
                yield key, _after_blanks(data, self._at)
            elif sign in OPENS:
                self._stack.append(key)
                key = None
            else:
                self._matches = self._matches and bool(self._stack)
                del self._stack[-1:]
                key = None


def _read(name: bytes) -> bytes:
    """Return a key as it is meant: a letter of it may be written as an escape."""
    if b"\\" in name:
        try:
            return str(json.loads(name)).encode(errors="backslashreplace")
        except ValueError:
            return name[1:-1]
    return name[1:-1]


def _after_blanks(data: bytes, at: int) -> int:
    match = BLANK.match(data, at)
    return at if match is None else match.end()


def _end_of(data: bytes, at: int, member: Member) -> int | None:
    """Return where a value ends that is to be replaced; None where it is not to be."""
    sign = data[at : at + 1]
    if not sign or sign not in member.opens:
        return None
    if sign in OPENS:
        kept = member.unless_empty and NO_CONTENT.match(data, at) is not None
        return None if kept else _end_of_container(data, at)
    match = (TOKEN if sign == b'"' else SCALAR).match(data, at)
    end = len(data) if match is None else match.end()
    return end if member.only is None or data[at:end] == member.only else None


def _end_of_container(data: bytes, at: int) -> int:
    """Return where its last bracket is, or where the data is cut off."""
    depth = 0
    while (token := BRACKET.search(data, at)) is not None:
        at = token.end()
        sign = data[token.start()]
        depth += (sign in OPENS) - (sign in CLOSES)
        if depth == 0:
            return at
    return len(data)
