"""What can go wrong in the proxy, and by whose fault."""

from typing import ClassVar, Literal

Fault = Literal["client", "proxy", "upstream"]


class ProxyError(Exception):
    """Root of the proxy's errors. Each knows its HTTP status and whose fault it was."""

    status: ClassVar[int] = 500
    fault: ClassVar[Fault] = "proxy"
    kind: ClassVar[str] = "server_error"
    # When the same request may be sent again, where that is likely to help.
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotAllowed(ProxyError):
    """The path or method is not one that the proxy forwards."""

    status = 404
    fault = "client"
    kind = "invalid_request_error"


class Forbidden(ProxyError):
    """The proxy could pass it on, and was not told that it may; the message names the setting."""

    status = 403
    fault = "client"
    kind = "invalid_request_error"


class BadRequest(ProxyError):
    """The request cannot be understood; the message names the field and the remedy."""

    status = 400
    fault = "client"
    kind = "invalid_request_error"


class KeyReused(BadRequest):
    """An idempotency key came back with another body."""

    status = 409


class TooSlow(BadRequest):
    """The request's body did not come within what `PAWL_BODY_S` allows."""

    status = 408


class Unexpected(ProxyError):
    """Something failed in the proxy that nobody foresaw; the log has the traceback."""


class TooLarge(BadRequest):
    """The request's body is larger than its limit, or holds more values than are parsed."""

    status = 413


class Overloaded(ProxyError):
    """There is no room in memory for the request now: `PAWL_IN_FLIGHT_MB`."""

    status = 503
    kind = "overloaded_error"
    retry_after_s = 1


class NoUpstream(BadRequest):
    """Nobody answers for the model that was asked for."""

    status = 404


class UpstreamUnreachable(ProxyError):
    """No connection to the upstream could be made."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class UpstreamBroke(ProxyError):
    """A request was sent, and the connection broke before any reply."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class ReplyTorn(UpstreamBroke):
    """A reply in one piece broke off, and nothing of it has been passed on."""


class UnreadableCoding(ProxyError):
    """A reply came in a content coding that was not asked for and that nobody here can decode."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class UpstreamSilent(UpstreamBroke):
    """A request was sent, and the upstream kept silent for longer than `PAWL_SILENCE_S`."""

    status = 504
    fault = "upstream"
    kind = "upstream_error"


class NoModels(ProxyError):
    """The upstream answered, and gave no list of its models."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class ReplyTooLarge(ProxyError):
    """A recorded reply in one piece is larger than `PAWL_MAX_REPLY_MB`."""

    status = 502
    fault = "proxy"
    kind = "server_error"


class SpoolFull(ProxyError):
    """What must be durable before it is answered could not be written down."""

    status = 507
    kind = "storage_error"


class SpoolInUse(ProxyError):
    """Another process holds the spool directory."""


class DoesNotStart(ProxyError):
    """A process of the proxy ends again and again as soon as it is started."""


class BadUpstreams(ProxyError):
    """The file that `PAWL_UPSTREAMS` names cannot be used."""
