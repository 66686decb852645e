"""Heads as they stand on the wire (pure): what is passed on, what is not, what is added.

Names and values stay the bytes they came as, in their order: what nobody has to change
reaches the other side unchanged.
"""

from collections.abc import Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

Headers = list[tuple[bytes, bytes]]

REASONS: Final[Mapping[int, bytes]] = {
    status.value: status.phrase.encode() for status in HTTPStatus
}
JSON: Final = (b"Content-Type", b"application/json")
CHUNKED: Final = (b"Transfer-Encoding", b"chunked")
CLOSE: Final = (b"Connection", b"close")
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
FRAMING: Final = (b"content-length", b"transfer-encoding")
# Replies that have no body and say no length (RFC 9110 §8.6, §15.4.5).
BODYLESS: Final = (204, 304)

# RFC 9110 §7.6.1: these belong to one connection and are never passed on.
HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
# What the sender of a message says for itself.
_OF_THE_REQUEST: Final = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_OF_A_PLAIN_REQUEST: Final = _OF_THE_REQUEST | {b"accept-encoding"}
_OF_THE_REPLY: Final = HOP_BY_HOP | {b"content-length"}
OURS: Final = b"x-pawl-"


def lowered(headers: Headers) -> dict[str, str]:
    """Values by lower-case name, for looking up; of a name given twice, the first.

    A value is UTF-8, as our own names are told in feedback; what is not is unprintable.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))
    return found


def for_upstream(headers: Headers, *, plain: bool) -> Headers:
    """The client's headers as the upstream gets them; `plain`: the reply must be readable."""
    unwanted = _with_named(_OF_A_PLAIN_REQUEST if plain else _OF_THE_REQUEST, headers)
    kept = [
        pair
        for pair in headers
        if (lower := pair[0].lower()) not in unwanted and not lower.startswith(OURS)
    ]
    if plain:
        kept.append((b"Accept-Encoding", b"identity"))
    return kept


def for_client(headers: Headers) -> Headers:
    """The upstream's headers as the client gets them, less what frames the body."""
    unwanted = _with_named(_OF_THE_REPLY, headers)
    return [pair for pair in headers if pair[0].lower() not in unwanted]


def _with_named(unwanted: frozenset[bytes], headers: Headers) -> frozenset[bytes]:
    """And what the `Connection` header names as its own."""
    for name, value in headers:
        # What nearly all say names nothing that is not on the list already.
        if len(name) == 10 and value != b"keep-alive" and name.lower() == b"connection":
            unwanted |= {token.strip().lower() for token in value.split(b",")}
    return unwanted


def head(first_line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A message's head, up to the empty line."""
    return b"\r\n".join([first_line, *map(b": ".join, headers), b"", b""])


def request_head(
    method: str, target: str, host: bytes, headers: Headers, length: int | None
) -> bytes:
    """A request's head; `length` None: the body comes in chunks."""
    framing = CHUNKED if length is None else (b"Content-Length", b"%d" % length)
    first = f"{method} {target} HTTP/1.1".encode("latin-1")
    return head(first, [(b"Host", host), *headers, framing])


def bodyless_head(method: str, target: str, host: bytes, headers: Headers) -> bytes:
    """A request's head where there is no body at all."""
    first = f"{method} {target} HTTP/1.1".encode("latin-1")
    return head(first, [(b"Host", host), *headers])


def reply_head(status: int, reason: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A reply's head."""
    return head(b"HTTP/1.1 %d %b" % (status, reason or REASONS.get(status, b"")), headers)


def refusal(status: int, body: bytes, *, bodyless: bool = False) -> bytes:
    """Return the whole reply to what is no request; `bodyless`: it was to HEAD."""
    date = formatdate(usegmt=True).encode()
    fault = b"client" if status < 500 or status == 505 else b"proxy"
    headers = [(b"Date", date), (b"x-pawl-fault", fault)]
    if body:
        headers.append(JSON)
    headers += [(b"Content-Length", b"%d" % len(body)), CLOSE]
    return reply_head(status, b"", headers) + (b"" if bodyless else body)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body (RFC 9112 §7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)
