"""How deep and how large JSON may be that is parsed (pure): one limit for all that read it.

Every parser here is recursive, and so is what walks over its values. What nests deeper than
`MAX_DEPTH` is refused or kept as bytes before any of them sees it.

Only what stands outside of strings counts. JSON that is not valid is counted as far as a parser
would read it: up to its first mistake.
"""

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Final, NamedTuple

MAX_DEPTH: Final = 100

_STRUCTURE: Final = b'"[]{},'
_REST: Final = bytes(set(range(256)) - set(_STRUCTURE))
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
# The steps that an opening and a closing bracket make.
_STEPS: Final = {b"["[0]: 1, b"]"[0]: -1}
_BACKSLASHES: Final = re.compile(rb"\\*")
_PIECE: Final = 64 * 1024
# Each pass takes the innermost brackets away; most JSON is gone after so many.
_PASSES: Final = 12


class Size(NamedTuple):
    """How much there is to be parsed: lists and objects, and values (about) of any kind."""

    containers: int
    values: int


def nests_too_deep(data: bytes) -> bool:
    """Whether lists and objects stand within each other more than `MAX_DEPTH` deep."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    brackets = b"".join(_outside_strings(data)).translate(_SQUARE, delete=b",")
    return brackets.count(b"[") > MAX_DEPTH and _depth_exceeds(brackets)


def most_of(data: bytes) -> Size:
    """Return an upper bound of the size of `data`, at once: brackets in strings count too."""
    containers = data.count(b"[") + data.count(b"{")
    return Size(containers, containers + data.count(b","))


def size_of(data: bytes, enough: Size) -> Size:
    """Return the size of `data`, or of its beginning that is larger than `enough` in either way.

    Strings are left out, which takes time; what is far too large is known soon.
    """
    containers = commas = 0
    for outside in _outside_strings(data):
        containers += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        if containers > enough.containers or containers + commas > enough.values:
            break
    return Size(containers, containers + commas)


def _outside_strings(data: bytes) -> Iterator[bytes]:
    """Yield the brackets and commas of `data` that are not part of a string, in order.

    Piece by piece: what a piece is split into takes fifty times its size, and between two of them
    other threads have a turn.
    """
    inside = 0
    for cut in _pieces(data):
        piece = cut
        if b'\\"' in piece:
            # Pairs first: then a backslash that is left before a quote escapes it.
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Two quotes side by side enclose nothing: without them the same is inside and outside.
        marks = piece.translate(None, delete=_REST).replace(b'""', b"")
        parts = marks.split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1


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
    """Whether more than `MAX_DEPTH` brackets are open at once."""
    left = brackets
    for taken in range(1, _PASSES + 1):
        left = left.replace(b"[]", b"")
        # A pass lowers the depth by one at most.
        if left.count(b"[") + taken <= MAX_DEPTH:
            return False
    # Step by step, and no further than needed: JSON that deep is rare, and mostly hostile.
    return any(depth > MAX_DEPTH for depth in accumulate(map(_STEPS.__getitem__, brackets)))
