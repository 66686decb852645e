"""Read what a request asks: what users say in it, whatever the instructions beside it (pure).

Instructions may hold the time of day or a session's id, and are then never the same twice. What was
said by the assistant, and what tools gave, is no question either.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final

import msgspec

# By wire format, the field that holds the conversation. A plain prompt has no instructions apart.
_FIELDS: Final = {"chat": "messages", "messages": "messages", "responses": "input"}
_USER: Final = "user"
_RESULT: Final = "tool_result"


class _Message(msgspec.Struct):
    role: Any = None
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    messages: list[_Message] | None = None
    input: str | list[_Message] | None = None


_body: Final = msgspec.json.Decoder(_Body)


def question_digest(dialect: str, request: bytes | None) -> bytes | None:
    """Return a digest of what users say in a request's conversation, in its order.

    Text is the same as a string or as parts. Return None if it cannot be read or nobody says
    anything.
    """
    field = _FIELDS.get(dialect)
    if field is None or request is None:
        return None
    try:
        pieces = _pieces(getattr(_body.decode(request), field))
    except (msgspec.DecodeError, RecursionError):
        return None
    if not any(pieces):
        return None
    digest = sha256()
    for piece in pieces:
        digest.update(b"%d:" % len(piece))
        digest.update(piece)
    return digest.digest()


def _pieces(conversation: str | list[_Message] | None) -> list[bytes]:
    if isinstance(conversation, str):
        return [_text(conversation)]
    return [_spoken(bytes(one.content)) for one in conversation or () if one.role == _USER]


def _spoken(content: bytes) -> bytes:
    """Return the text of one message, whose content is JSON."""
    # The bytes of such a string are its text: there is nothing to decode, and to encode again.
    if content[:1] == content[-1:] == b'"' and b"\\" not in content and content.isascii():
        return content[1:-1]
    return b"".join(_said(msgspec.json.decode(content)))


def _said(content: Any) -> Iterator[bytes]:
    """Yield the text of one message; parts that are no text as JSON, but for results of tools."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield _text(text)
        elif isinstance(part, dict) and part.get("type") != _RESULT:
            yield msgspec.json.encode(part, order="sorted")


def _text(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
