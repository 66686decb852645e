"""Answers a client with an error, in the format of its API, and with the party at fault."""

from typing import Final

from proxy.errors import ProxyError, Unexpected
from proxy.formats.errors import error_body
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON, Headers

# The header of an error that is passed on as the upstream sent it, whatever its cause.
UPSTREAM_SAID: Final = (b"x-pawl-fault", b"upstream")
UNEXPECTED: Final = "The proxy failed unexpectedly; its log has the details"


def spoken_at(target: str) -> str:
    """Return the dialect whose errors a client of this path understands."""
    return "messages" if "/v1/messages" in target else "chat"


def explain(target: str, status: int, why: str) -> bytes:
    """Return the error body for bytes that could not be read as a request."""
    kind = "server_error" if status == 500 else "invalid_request_error"
    return error_body(spoken_at(target), f"The request was not read: {why}.", kind, status=status)


def refuse(
    exchange: Exchange,
    error: ProxyError,
    *,
    dialect: str | None = None,
    headers: Headers | None = None,
) -> None:
    """Answer with an error, in the format of `dialect` or, if that is None, of the path.

    If the reply has begun already, its connection is closed before the reply's end instead.
    """
    if exchange.started:
        exchange.tear()
        return
    spoken = dialect or spoken_at(exchange.target)
    body = error_body(
        spoken, error.message, error.kind, error.param, error.code, status=error.status
    )
    reply_headers: Headers = [JSON, (b"x-pawl-fault", error.fault.encode()), *(headers or [])]
    if error.retry_after_s is not None:
        reply_headers.append((b"Retry-After", b"%d" % error.retry_after_s))
    exchange.reply(error.status, b"", reply_headers, body)


def apologise(
    exchange: Exchange, *, dialect: str | None = None, headers: Headers | None = None
) -> None:
    """Answer 500 for an unforeseen failure and close; a reply that has begun is cut off instead."""
    if not exchange.open:
        return
    if exchange.started:
        exchange.tear()
        return
    exchange.keep_alive = False
    call = f" (call {exchange.call})" if exchange.call else ""
    refuse(exchange, Unexpected(f"{UNEXPECTED}{call}."), dialect=dialect, headers=headers)
