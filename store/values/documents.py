"""Limit, check and parse JSON documents that clients and servers wrote (pure).

Documents are kept as text and never re-encoded, so that a number such as 1.10 is unchanged.

The JSON parsers are recursive, and so is the code that walks over parsed values. JSON that nests
deeper than `MAX_DEPTH` is therefore refused, or kept as bytes, before a parser reads it.

Depth and size are computed from the characters outside of strings. Invalid JSON is measured as far
as a parser would read it: up to its first mistake (docs/decisions/030-limits-on-what-is-parsed.md).
"""

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple

import msgspec

MAX_DEPTH: Final = 100

_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[]{},'))
_NOT_NESTING: Final = bytes(set(range(256)) - set(b'"[]{}'))
_NOT_MEMBERS: Final = bytes(set(range(256)) - set(b'":'))
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[{"))
_NOT_COUNTED: Final = bytes(set(range(256)) - set(b"[{,"))
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
# The change of depth at an opening and at a closing bracket.
_STEPS: Final = {b"["[0]: 1, b"]"[0]: -1}
_BACKSLASHES: Final = re.compile(rb"\\*")
_PIECE: Final = 64 * 1024
# Up to this length it is faster to count all brackets first, even those in strings.
_SHORT: Final = 16 * 1024
# Each pass removes the innermost brackets; most JSON has none left after this many.
_PASSES: Final = 12


class Size(NamedTuple):
    """The number of a JSON document's lists and objects, and (about) of all its values."""

    containers: int
    values: int


def nests_too_deep(data: bytes) -> bool:
    """Return whether lists and objects are nested more than `MAX_DEPTH` levels deep."""
    if len(data) <= MAX_DEPTH:
        return False
    if len(data) <= _SHORT and len(data.translate(None, _NO_BRACKETS)) <= MAX_DEPTH:
        return False
    if _certainly_flat(data):
        return False
    brackets = b"".join(_outside_strings(_marks(data, _NOT_NESTING))).translate(_SQUARE)
    return brackets.count(b"[") > MAX_DEPTH and _depth_exceeds(brackets)


def size_bound(data: bytes) -> Size:
    """Return a fast upper bound of the size of `data`: brackets in strings count, too."""
    if len(data) <= _PIECE:
        return _size_bound_of_piece(data)
    # Other threads can run between two pieces: a single pass over 8 MB keeps the GIL for 17 ms, and
    # an event loop needs the GIL ten times a call.
    sizes = [
        _size_bound_of_piece(data[start : start + _PIECE]) for start in range(0, len(data), _PIECE)
    ]
    return Size(sum(size.containers for size in sizes), sum(size.values for size in sizes))


def _size_bound_of_piece(data: bytes) -> Size:
    # One pass over the data, which is on every call's path; three counts take twice as long.
    counted = data.translate(None, _NOT_COUNTED)
    return Size(len(counted) - counted.count(b","), len(counted))


def size_of(data: bytes, enough: Size) -> Size:
    """Return the size of `data`; stop counting once it exceeds `enough` in either number.

    Leaving strings out takes time. Stopping at `enough` keeps it short for JSON that is far too
    large.
    """
    containers = commas = 0
    for outside in _outside_strings(_marks(data, _NOT_STRUCTURE)):
        containers += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        if containers > enough.containers or containers + commas > enough.values:
            break
    return Size(containers, containers + commas)


def count_members(data: bytes) -> int:
    """Return how many members the objects of a valid JSON document have, repeated names counted.

    Each member has one colon outside of strings.
    """
    return sum(outside.count(b":") for outside in _outside_strings(_marks(data, _NOT_MEMBERS)))


def _certainly_flat(data: bytes) -> bool:
    """Return whether a fast upper bound of the depth is at most `MAX_DEPTH`.

    Two brackets without a quote between them are both in one string, or both outside. So a pair
    that opens and closes, or closes and opens, does not change the depth after it in either case.
    The brackets that remain without such pairs open at most one level each. Within a removed pair
    the depth is one more, or two more if one pair was within another.
    """
    depth = 2
    for marks in _marks(data, _NOT_NESTING):
        rest = marks.replace(b"[]", b"").replace(b"{}", b"")
        depth += rest.count(b"[") + rest.count(b"{") - rest.count(b"}{") - rest.count(b"][")
        if depth > MAX_DEPTH:
            return False
    return True


def _outside_strings(marked: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the marks outside of strings, in order and without quotes."""
    inside = 0
    for marks in marked:
        # Two adjacent quotes enclose nothing. Removing them changes neither inside nor outside.
        parts = marks.replace(b'""', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1


def _marks(data: bytes, others: bytes) -> Iterator[bytes]:
    """Yield `data` without the bytes in `others` and without escaped quotes.

    It works piece by piece: splitting takes fifty times the memory of a piece, and other threads
    can run between two pieces.
    """
    for cut in _pieces(data):
        piece = cut
        # Looking for one byte takes a thirtieth of the time of looking for two.
        if b"\\" in piece and b'\\"' in piece:
            # Remove pairs of backslashes first. One that remains before a quote escapes the quote.
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        yield piece.translate(None, delete=others)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield `data` in pieces, none of which ends between a backslash and what it escapes."""
    start = 0
    while start < len(data):
        end = start + _PIECE
        if data[end - 1 : end] == b"\\":
            rest = _BACKSLASHES.match(data, end)
            end = rest.end() + 1 if rest is not None else end
        yield data[start:end]
        start = end


def _depth_exceeds(brackets: bytes) -> bool:
    """Return whether more than `MAX_DEPTH` of the square brackets are open at once."""
    remaining = brackets
    for passes in range(1, _PASSES + 1):
        remaining = remaining.replace(b"[]", b"")
        # A pass lowers the depth by one at most.
        if remaining.count(b"[") + passes <= MAX_DEPTH:
            return False
    # Bracket by bracket, up to the first that is too deep: such JSON is rare, and mostly hostile.
    return any(depth > MAX_DEPTH for depth in accumulate(map(_STEPS.__getitem__, brackets)))


def compact(text: bytes) -> bytes:
    """Return a JSON document without insignificant whitespace; all else is the same bytes.

    Raises:
        ValueError: the text is not a JSON document, or nests deeper than `MAX_DEPTH`.
    """
    _check_json(text)
    try:
        return msgspec.json.format(text, indent=-1)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def parse(text: bytes, kind: Any) -> Any:
    """Return a JSON document as a value of `kind`.

    Raises:
        ValueError: the text is no value of that kind, or nests deeper than `MAX_DEPTH`.
    """
    _check_json(text)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from error


def _check_json(text: bytes) -> None:
    if not text.isascii():
        text.decode()
    if nests_too_deep(text):
        raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
