"""JSON documents that others wrote, before they are put into a line or taken apart (pure).

They are kept as text and never encoded anew: a number such as 1.10 or 1e400 stays what it is.
"""

import re
from array import array
from itertools import accumulate
from typing import Any, Final

import msgspec

# Twice what the proxy lets in, which leaves room for what a stream is put together into. It is
# far below the 1,000 levels at which Python's parsers and encoders give up.
DEEPEST: Final = 200

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NO_BRACKET: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def compact(text: bytes) -> bytes:
    """Return a JSON document without insignificant whitespace, all else to the byte.

    Raises:
        ValueError: the text is no JSON document, or one that nests deeper than `DEEPEST`.
    """
    _check(text)
    try:
        return msgspec.json.format(text, indent=-1)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def parse(text: bytes, kind: Any) -> Any:
    """Return a JSON document as a value of `kind`.

    Raises:
        ValueError: it is none of that kind, or it nests deeper than `DEEPEST`.
    """
    _check(text)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from error


def is_too_deep(text: bytes) -> bool:
    """Return whether a document nests deeper than `DEEPEST`; linear in its length."""
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return False
    brackets = _STRING.sub(b"", text).translate(_STEPS, _NO_BRACKET)
    return max(accumulate(array("b", brackets)), default=0) > DEEPEST


def _check(text: bytes) -> None:
    if not text.isascii():
        text.decode()
    if is_too_deep(text):
        raise ValueError(f"it nests deeper than {DEEPEST} levels")
