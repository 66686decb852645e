"""Answer a client with an error, in the format of its API, and with the party at fault."""

from collections.abc import Mapping
from typing import Final

from proxy.errors import ProxyError, Unexpected
from proxy.formats.errors import OPENAI, ErrorShape
from proxy.formats.registry import FORMATS
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON, Headers

# What replies of a status must have (RFC 9110 §11.6.1, §15.5.22).
REQUIRED: Final[Mapping[int, Headers]] = {
    401: [(b"WWW-Authenticate", b"Bearer")],
    426: [(b"Upgrade", b"HTTP/1.1"), (b"Connection", b"Upgrade")],
}
# The header of an error that is passed on as the upstream sent it, whatever its cause.
UPSTREAM_SAID: Final = (b"x-pawl-fault", b"upstream")
UNEXPECTED: Final = "The proxy failed unexpectedly; its log has the details"


def errors_at(target: str) -> ErrorShape:
    """Return the form of errors that a client of this path understands."""
    return next((one.errors for one in FORMATS.values() if one.path in target), OPENAI)


def explain(target: str, status: int, why: str) -> bytes:
    """Return the error body for bytes that could not be read as a request."""
    kind = "server_error" if status == 500 else "invalid_request_error"
    return errors_at(target).body(f"The request was not read: {why}.", kind, status=status)


def refuse(
    exchange: Exchange,
    error: ProxyError,
    *,
    errors: ErrorShape | None = None,
    headers: Headers | None = None,
) -> None:
    """Answer with an error, in the form `errors` or, if that is None, that of the path.

    If the reply has begun already, its connection is closed before the reply's end instead.
    """
    if exchange.started:
        exchange.tear()
        return
    shape = errors or errors_at(exchange.target)
    body = shape.body(error.message, error.kind, error.param, error.code, status=error.status)
    reply_headers: Headers = [JSON, (b"x-pawl-fault", error.fault.encode()), *(headers or [])]
    reply_headers += REQUIRED.get(error.status, [])
    if error.retry_after_s is not None:
        reply_headers.append((b"Retry-After", b"%d" % error.retry_after_s))
    exchange.reply(error.status, b"", reply_headers, body)


def send_internal_error(
    exchange: Exchange, *, errors: ErrorShape | None = None, headers: Headers | None = None
) -> None:
    """Answer 500 for an unforeseen failure and close; a reply that has begun is cut off instead."""
    if not exchange.open:
        return
    if exchange.started:
        exchange.tear()
        return
    exchange.keep_alive = False
    call = f" (call {exchange.call})" if exchange.call else ""
    refuse(exchange, Unexpected(f"{UNEXPECTED}{call}."), errors=errors, headers=headers)
