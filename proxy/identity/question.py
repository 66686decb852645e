"""Read what a request asks: what users say in it, whatever the instructions beside it (pure).

Instructions may hold the time of day or a session's id, and are then never the same twice. What was
said by the assistant, and what tools gave, is no question either. The ingester hands `question_of`
to the store, which asks only where an episode's task may come of it. Episodes of one question are a
group in the database, so that the digest of the same bytes must never change.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, Final

import msgspec

from proxy.formats.raw_json import UNREADABLE, parse_object
from proxy.formats.registry import FORMATS
from store.records import CallRecord

_RESULT: Final = "tool_result"


def question_of(call: CallRecord) -> bytes | None:
    """Return a digest of what users say in a call's request, as its wire format holds it.

    Return None if the request cannot be read, nobody says anything, or the format is unknown.
    """
    wire_format = FORMATS.get(call.dialect)
    if wire_format is None or call.request is None:
        return None
    parsed = parse_object(call.request)
    if parsed is None:
        return None
    try:
        return _digest(map(_spoken, map(bytes, wire_format.turns.said_by_users(parsed))))
    except UNREADABLE:
        return None


def _digest(texts: Iterable[bytes]) -> bytes | None:
    """Return a digest of texts, and of where each ends; None if all are empty.

    Text is the same as a string or as parts.
    """
    digest, is_asked = sha256(), False
    for text in texts:
        digest.update(b"%d:" % len(text))
        digest.update(text)
        is_asked |= bool(text)
    return digest.digest() if is_asked else None


def _spoken(content: bytes) -> bytes:
    """Return the text of one message, whose content is JSON."""
    # The bytes of such a string are its text: there is nothing to decode, and to encode again.
    if content[:1] == content[-1:] == b'"' and b"\\" not in content and content.isascii():
        return content[1:-1]
    return b"".join(_texts(msgspec.json.decode(content)))


def _texts(content: Any) -> Iterator[bytes]:
    """Yield the text of one message; parts that are no text as JSON, but for results of tools."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text.encode(errors="surrogatepass")
        elif isinstance(part, dict) and part.get("type") != _RESULT:
            yield msgspec.json.encode(part, order="sorted")
