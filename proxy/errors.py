"""The proxy's errors, each with its HTTP status and the party at fault."""

from typing import ClassVar, Literal

Fault = Literal["client", "proxy", "upstream"]


class ProxyError(Exception):
    """Base of the proxy's errors; each class sets its HTTP status and who is at fault.

    `kind` is the `type` of the error object that the client gets.
    """

    status: ClassVar[int] = 500
    fault: ClassVar[Fault] = "proxy"
    kind: ClassVar[str] = "server_error"
    # Set where sending the same request again, after so many seconds, is likely to help.
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Store the message, and the `param` and `code` of OpenAI's error object."""
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
    """The request needs a setting that is off; the message names it."""

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
    """The request's body came more slowly than `PAWL_BODY_S` allows."""

    status = 408


class Unexpected(ProxyError):
    """An unexpected error in the proxy; the log has the traceback."""


class TooLarge(BadRequest):
    """The request's body is larger than its limit, or holds too many values."""

    status = 413


class Overloaded(ProxyError):
    """The memory budget `PAWL_IN_FLIGHT_MB` has no room for the request now."""

    status = 503
    kind = "overloaded_error"
    retry_after_s = 1


class NoUpstream(BadRequest):
    """No upstream serves the requested model."""

    status = 404


class NotServed(BadRequest):
    """The request names a version of a policy that the model server does not have."""

    status = 404


class NotLoaded(ProxyError):
    """No replica of the model server has the version that serves the request, for now."""

    status = 503
    fault = "upstream"
    kind = "upstream_error"
    retry_after_s = 2


class UpstreamUnreachable(ProxyError):
    """No connection to the upstream could be made."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class UpstreamBroke(ProxyError):
    """The connection broke after the request was sent, and before any reply."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class ReplyTorn(UpstreamBroke):
    """A reply in one piece broke off before any of it was passed on."""


class UnreadableCoding(ProxyError):
    """A reply came in a content coding that was not requested and cannot be decoded."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class UpstreamSilent(UpstreamBroke):
    """The upstream was silent for longer than `PAWL_SILENCE_S` after the request was sent."""

    status = 504
    fault = "upstream"
    kind = "upstream_error"


class NoModels(ProxyError):
    """The upstream's answer to a request for its models was not a list of models."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class ReplyTooLarge(ProxyError):
    """A recorded reply in one piece is larger than `PAWL_MAX_REPLY_MB`."""

    status = 502
    fault = "proxy"
    kind = "server_error"


class SpoolFull(ProxyError):
    """A record that must be durable before the answer could not be written to disk."""

    status = 507
    kind = "storage_error"


class SpoolInUse(ProxyError):
    """Another process holds the spool directory."""


class DoesNotStart(ProxyError):
    """A process of the proxy ends repeatedly right after its start."""


class BadUpstreams(ProxyError):
    """The file that `PAWL_UPSTREAMS` names cannot be used."""
