"""Write heads of requests and replies: which headers are passed on, removed and added (pure).

Names and values keep their bytes and their order, so that the other side gets them unchanged.

The default tenant's headers are passed on as if there were no proxy. Other tenants have an
allow-list: headers that describe the body, the client and the API. Gateways have headers that
change a request's model (`x-gateway-model-name-rewrite`), host (`x-portkey-custom-host`) or place
in the queue (`x-vllm-priority`), or return another client's reply (`idempotency-key`); a list of
all of these cannot be complete.
"""

from collections.abc import Iterable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from store.tenants import DEFAULT

Headers = list[tuple[bytes, bytes]]

REASONS: Final[Mapping[int, bytes]] = {
    status.value: status.phrase.encode() for status in HTTPStatus
}
JSON: Final = (b"Content-Type", b"application/json")
CHUNKED: Final = (b"Transfer-Encoding", b"chunked")
CLOSE: Final = (b"Connection", b"close")
CONTINUE_REPLY: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
FRAMING: Final = (b"content-length", b"transfer-encoding")
# Statuses of replies without a body or a length (RFC 9110 §8.6, §15.4.5).
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
# Headers that are not passed on: the sender of each message sets its own.
_NOT_TO_UPSTREAM: Final = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_NOT_TO_UPSTREAM_IF_PLAIN: Final = _NOT_TO_UPSTREAM | {b"accept-encoding"}
_NOT_TO_CLIENT: Final = HOP_BY_HOP | {b"content-length"}
# Prefix of Pawl's own headers.
OWN_PREFIX: Final = b"x-pawl-"
# Client credentials, removed before ours are added.
CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key"})
_ALLOWED_FOR_ALL_TENANTS: Final = frozenset(
    {
        *(b"accept", b"accept-encoding", b"accept-language", b"content-type", b"content-encoding"),
        *(b"user-agent", b"anthropic-version", b"anthropic-beta", b"openai-beta"),
        *(b"traceparent", b"tracestate"),
    }
)
# Prefix of the headers by which SDKs describe themselves.
_SDK_PREFIX: Final = b"x-stainless-"


def headers_by_name(headers: Headers) -> dict[str, str]:
    """Return values by lower-case name, for look-ups; if a name occurs twice, its first value.

    Values are decoded as UTF-8, like names in feedback; other bytes become lone surrogates.
    """
    # In reverse, so that the first of several values wins.
    return {
        _lower(name): str(value, "utf-8", "surrogateescape") for name, value in reversed(headers)
    }


@lru_cache(maxsize=1024)
def _lower(name: bytes) -> str:
    """Return a header's name in lower case, cached: nearly all requests have the same names."""
    return name.decode("latin-1").lower()


def first_value(headers: Headers, wanted: bytes) -> bytes | None:
    """Return a header's first value, or None; `wanted` is its name in lower case."""
    size = len(wanted)
    for name, value in headers:
        # Comparing lengths is far cheaper than lowering every name.
        if len(name) == size and name.lower() == wanted:
            return value
    return None


def is_framed(headers: Headers) -> bool:
    """Return whether headers tell where their message's body ends."""
    length, coding = FRAMING
    return first_value(headers, length) is not None or first_value(headers, coding) is not None


def headers_for_upstream(headers: Headers, tenant: str, *, plain: bool) -> Headers:
    """Return a tenant's headers for the upstream; with `plain`, ask for an uncompressed reply."""
    unwanted = _with_connection_headers(
        _NOT_TO_UPSTREAM_IF_PLAIN if plain else _NOT_TO_UPSTREAM, headers
    )
    kept = _without_own_headers(headers, unwanted)
    if plain:
        kept.append((b"Accept-Encoding", b"identity"))
    if tenant == DEFAULT:
        return kept
    return [pair for pair in kept if is_allowed_for_all_tenants(pair[0])]


def is_allowed_for_all_tenants(name: bytes) -> bool:
    """Return whether a header is passed on for every tenant, because it is on the allow-list."""
    lower = name.lower()
    return lower in _ALLOWED_FOR_ALL_TENANTS or lower.startswith(_SDK_PREFIX)


def headers_for_client(headers: Headers) -> Headers:
    """Return the upstream's headers for the client, without those that frame the body.

    The upstream's `x-pawl-…` headers are left out too: they could name another tenant's version or
    call, and an upstream that is a Pawl itself names its own.
    """
    unwanted = _with_connection_headers(_NOT_TO_CLIENT, headers)
    return _without_own_headers(headers, unwanted)


def _without_own_headers(headers: Headers, unwanted: frozenset[bytes]) -> Headers:
    """Return headers without the `unwanted` names and without Pawl's own headers."""
    return [
        pair
        for pair in headers
        if (lower := pair[0].lower()) not in unwanted and not lower.startswith(OWN_PREFIX)
    ]


def _with_connection_headers(unwanted: frozenset[bytes], headers: Headers) -> frozenset[bytes]:
    """Return `unwanted` and the header names that the `Connection` header lists."""
    for name, value in headers:
        # `keep-alive`, which nearly all clients send, is on the list already.
        if len(name) == 10 and value != b"keep-alive" and name.lower() == b"connection":
            unwanted |= {token.strip().lower() for token in value.split(b",")}
    return unwanted


def message_head(first_line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a message's head, including the empty line at its end."""
    return b"\r\n".join([first_line, *map(b": ".join, headers), b"", b""])


def request_head(
    method: str, target: str, host: bytes, headers: Headers, length: int | None
) -> bytes:
    """Return a request's head; a `length` of None means a chunked body."""
    framing = CHUNKED if length is None else (b"Content-Length", b"%d" % length)
    first = f"{method} {target} HTTP/1.1".encode("latin-1")
    return message_head(first, [(b"Host", host), *headers, framing])


def bodyless_head(method: str, target: str, host: bytes, headers: Headers) -> bytes:
    first = f"{method} {target} HTTP/1.1".encode("latin-1")
    return message_head(first, [(b"Host", host), *headers])


def reply_head(status: int, reason: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return message_head(b"HTTP/1.1 %d %b" % (status, reason or REASONS.get(status, b"")), headers)


def refusal(status: int, body: bytes, *, bodyless: bool = False) -> bytes:
    """Return the whole reply to a refused request; without `body` if `bodyless` (for HEAD)."""
    date = formatdate(usegmt=True).encode()
    fault = b"client" if status < 500 or status == 505 else b"proxy"
    headers = [(b"Date", date), (b"x-pawl-fault", fault)]
    if body:
        headers.append(JSON)
    headers += [(b"Content-Length", b"%d" % len(body)), CLOSE]
    return reply_head(status, b"", headers) + (b"" if bodyless else body)


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body (RFC 9112 §7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)
