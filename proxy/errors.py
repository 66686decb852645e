"""Define the proxy's errors, each with its HTTP status and the party at fault."""

from typing import ClassVar, Literal

Fault = Literal["client", "proxy", "upstream"]


class ProxyError(Exception):
    """Be the root of the proxy's errors; each class sets its HTTP status and who is at fault.

    `kind` is the `type` of the error object that the client gets.
    """

    status: ClassVar[int] = 500
    fault: ClassVar[Fault] = "proxy"
    kind: ClassVar[str] = "server_error"
    # Set where sending the same request again, after so many seconds, is likely to help.
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Store the message, and the `param` and `code` of OpenAI's error object."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotAllowed(ProxyError):
    """Report that the path or method is not one that the proxy forwards."""

    status = 404
    fault = "client"
    kind = "invalid_request_error"


class Forbidden(ProxyError):
    """Report that the request needs a setting that is off; the message names it."""

    status = 403
    fault = "client"
    kind = "invalid_request_error"


class NoKey(ProxyError):
    """Report that the request shows no API key, or one that is wrong or revoked."""

    status = 401
    fault = "client"
    kind = "invalid_request_error"


class OutOfScope(Forbidden):
    """Report that the request's API key is not for this endpoint; the message names the scope."""


class TooMany(ProxyError):
    """Report that the request's API key has as many requests as its limits allow."""

    status = 429
    fault = "client"
    kind = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int) -> None:
        """Store the message, and after how many seconds the request is let in again."""
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class BadRequest(ProxyError):
    """Report that the request cannot be understood; the message names the field and the remedy."""

    status = 400
    fault = "client"
    kind = "invalid_request_error"


class KeyReused(BadRequest):
    """Report that an idempotency key came back with another body."""

    status = 409


class TooSlow(BadRequest):
    """Report that the request's body came more slowly than `PAWL_BODY_S` allows."""

    status = 408


class Unexpected(ProxyError):
    """Report that the proxy failed unexpectedly; the log has the traceback."""


class TooLarge(BadRequest):
    """Report that the request's body is larger than its limit, or holds too many values."""

    status = 413


class Overloaded(ProxyError):
    """Report that the memory budget `PAWL_IN_FLIGHT_MB` has no room for the request now."""

    status = 503
    kind = "overloaded_error"
    retry_after_s = 1


class KeysUnknown(ProxyError):
    """Report that the proxy cannot read the API keys now, so it lets nobody in."""

    status = 503
    retry_after_s = 2


class NoUpstream(BadRequest):
    """Report that no upstream serves the requested model."""

    status = 404


class NotServed(BadRequest):
    """Report that the model server does not have the version of a policy that the request names."""

    status = 404


class NotContinued(BadRequest):
    """Report that the response that a call is to go on from is not its tenant's."""

    status = 404


class NotKnownNow(ProxyError):
    """Report that the database has to tell whose a name is, and does not answer."""

    status = 503
    retry_after_s = 2


class NotLoaded(ProxyError):
    """Report that no replica of the model server has the serving version loaded, for now."""

    status = 503
    fault = "upstream"
    kind = "upstream_error"
    retry_after_s = 2


class UpstreamUnreachable(ProxyError):
    """Report that no connection to the upstream could be made."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class UpstreamBroke(ProxyError):
    """Report that the connection broke after the request was sent, and before any reply."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class ReplyTorn(UpstreamBroke):
    """Report that a reply in one piece broke off before any of it was passed on."""


class Redirected(ProxyError):
    """Report that the upstream sends a client that has one of our keys to another address."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class UnreadableCoding(ProxyError):
    """Report that a reply's content coding was not requested and cannot be decoded."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class UpstreamSilent(UpstreamBroke):
    """Report that the upstream was silent beyond `PAWL_SILENCE_S` after the request was sent."""

    status = 504
    fault = "upstream"
    kind = "upstream_error"


class NoModels(ProxyError):
    """Report that the upstream's answer to a request for its models was not a list of models."""

    status = 502
    fault = "upstream"
    kind = "upstream_error"


class ReplyTooLarge(ProxyError):
    """Report that a recorded reply in one piece is larger than `PAWL_MAX_REPLY_MB`."""

    status = 502
    fault = "proxy"
    kind = "server_error"


class SpoolFull(ProxyError):
    """Report that a record that must be durable before the answer could not be written to disk."""

    status = 507
    kind = "storage_error"


class SpoolInUse(ProxyError):
    """Report that another process holds the spool directory."""


class DoesNotStart(ProxyError):
    """Report that a process of the proxy ends repeatedly right after its start."""


class BadUpstreams(ProxyError):
    """Report that the file that `PAWL_UPSTREAMS` names cannot be used."""


class BadRedaction(ProxyError):
    """Report that the file that `PAWL_REDACTION` names cannot be used."""
