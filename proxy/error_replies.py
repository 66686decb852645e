"""Send errors to clients, in the format of their API and with the party at fault."""

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

import structlog

from proxy.errors import OutOfScope, ProxyError, Unexpected
from proxy.formats.errors import OPENAI, ErrorShape
from proxy.formats.registry import FORMATS
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON, Headers
from proxy.metrics import REFUSED
from proxy.routing import find_route

log = structlog.get_logger()

# Headers that replies of a status must have (RFC 9110 §11.6.1, §15.5.22).
REQUIRED_HEADERS: Final[Mapping[int, Headers]] = {
    401: [(b"WWW-Authenticate", b"Bearer")],
    426: [(b"Upgrade", b"HTTP/1.1"), (b"Connection", b"Upgrade")],
}
# Header of an error that is passed on as the upstream sent it, whatever its cause.
UPSTREAM_AT_FAULT: Final = (b"x-pawl-fault", b"upstream")
# Statuses of refusals that are logged: unauthenticated and forbidden.
LOGGED_STATUSES: Final = frozenset({401, 403})
# Refusals logged a minute: clients must not fill the disk.
MOST_LINES: Final = 20
MINUTE_S: Final = 60.0
UNEXPECTED: Final = "The proxy failed unexpectedly; its log has the details"


def error_shape_of(target: str) -> ErrorShape:
    """Return the error format of the API at a request's target, OpenAI's by default."""
    return next((one.errors for one in FORMATS.values() if one.path in target), OPENAI)


def unreadable_request_body(target: str, status: int, why: str) -> bytes:
    """Return the body of the reply to bytes that could not be read as a request."""
    kind = "server_error" if status == 500 else "invalid_request_error"
    return error_shape_of(target).body(f"The request was not read: {why}.", kind, status=status)


class RefusalLog:
    """Log the requests that this process refused with 401 or 403, at most `MOST_LINES` a minute.

    The next minute's first line states how many were left out.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Start the first minute at the first refusal; `clock` returns seconds."""
        self._clock = clock
        self._until = float("-inf")
        self._lines = 0
        self._left_out = 0

    def log_refusal(
        self, status: int, reason: str | None, path: str, key: str | None, client: str | None
    ) -> None:
        """Log a refusal with 401 or 403; `path` has no ids, and `key` is the API key's name."""
        if status not in LOGGED_STATUSES:
            return
        now = self._clock()
        if now >= self._until:
            self._until, self._lines = now + MINUTE_S, 0
        if self._lines == MOST_LINES:
            self._left_out += 1
            return
        more = {"left_out": self._left_out} if self._left_out else {}
        self._lines, self._left_out = self._lines + 1, 0
        log.warning(
            "refused", status=status, reason=reason, path=path, key=key, client=client, **more
        )

    def log_error(
        self, error: ProxyError, path: str, client: str | None, key: str | None = None
    ) -> None:
        """Log a refusal by its error; an `OutOfScope` error's own key name overrides `key`."""
        name = error.key if isinstance(error, OutOfScope) else key
        self.log_refusal(error.status, error.code, path, name, client)


# One for each process, like its metrics.
REFUSALS: Final = RefusalLog()


def send_error(
    exchange: Exchange,
    error: ProxyError,
    *,
    errors: ErrorShape | None = None,
    headers: Headers | None = None,
) -> None:
    """Count an error and send it, in the format `errors` or, if None, in that of the path's API.

    If the reply has begun already, it is cut off instead, and the connection closed.
    """
    REFUSED.labels(type(error).__name__).inc()
    if error.status in LOGGED_STATUSES:
        # Only requests to served paths are refused with these statuses.
        label = find_route(exchange.method, exchange.target.partition("?")[0]).label
        REFUSALS.log_error(error, label, exchange.peer_address, exchange.key_name)
    if exchange.started:
        exchange.tear()
        return
    shape = errors or error_shape_of(exchange.target)
    body = shape.body(error.message, error.kind, error.param, error.code, status=error.status)
    reply_headers: Headers = [JSON, (b"x-pawl-fault", error.fault.encode()), *(headers or [])]
    reply_headers += REQUIRED_HEADERS.get(error.status, [])
    if error.retry_after_s is not None:
        reply_headers.append((b"Retry-After", b"%d" % error.retry_after_s))
    exchange.reply(error.status, b"", reply_headers, body)


def send_internal_error(
    exchange: Exchange, *, errors: ErrorShape | None = None, headers: Headers | None = None
) -> None:
    """Answer 500 for an unforeseen failure, or cut off a reply that has begun; then close."""
    if not exchange.is_open:
        REFUSED.labels(Unexpected.__name__).inc()
        return
    exchange.keep_alive = False
    call = f" (call {exchange.call})" if exchange.call else ""
    send_error(exchange, Unexpected(f"{UNEXPECTED}{call}."), errors=errors, headers=headers)
