"""Check and parse JSON documents that clients and servers wrote (pure).

They are kept as text and never re-encoded, so that a number such as 1.10 or 1e400 is unchanged.
"""

from typing import Any

import msgspec

from store.values.json_limits import MAX_DEPTH, nests_too_deep


def compact(text: bytes) -> bytes:
    """Return a JSON document without insignificant whitespace; all else is the same bytes.

    Raises:
        ValueError: the text is not a JSON document, or nests deeper than `MAX_DEPTH`.
    """
    _check(text)
    try:
        return msgspec.json.format(text, indent=-1)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def parse(text: bytes, kind: Any) -> Any:
    """Return a JSON document as a value of `kind`.

    Raises:
        ValueError: it is not a value of that kind, or it nests deeper than `MAX_DEPTH`.
    """
    _check(text)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from error


def _check(text: bytes) -> None:
    if not text.isascii():
        text.decode()
    if nests_too_deep(text):
        raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
