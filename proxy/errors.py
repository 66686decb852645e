"""Define the proxy's errors, each with its HTTP status and the party at fault."""

from typing import ClassVar, Literal

Fault = Literal["client", "proxy", "upstream"]


class ProxyError(Exception):
    """Root of the proxy's errors; each class sets its HTTP status and the party at fault.

    `kind` is the `type` of the client's error object. `retry_after_s` is set if the same request is
    likely to succeed when it is sent again after that many seconds.
    """

    status: ClassVar[int] = 500
    fault: ClassVar[Fault] = "proxy"
    kind: ClassVar[str] = "server_error"
    retry_after_s: int | None = None

    def __init_subclass__(
        cls,
        status: int | None = None,
        fault: Fault | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """Set the given class attributes; the others are inherited."""
        cls.status = cls.status if status is None else status
        cls.fault = cls.fault if fault is None else fault
        cls.kind = cls.kind if kind is None else kind
        cls.retry_after_s = cls.retry_after_s if retry_after_s is None else retry_after_s

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Store the message, and the `param` and `code` of OpenAI's error object."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class NotAllowed(ProxyError, status=404, fault="client", kind="invalid_request_error"):
    """Report that the path or method is not one that the proxy forwards."""


class NoWebsocket(ProxyError, status=426, fault="client", kind="invalid_request_error"):
    """Report that the client wants to open a websocket, on a path that is served over HTTP."""


class Forbidden(ProxyError, status=403, fault="client", kind="invalid_request_error"):
    """Report that the request is not allowed here; the message names the reason and a remedy."""


class NoKey(ProxyError, status=401, fault="client", kind="invalid_request_error"):
    """Report that the request has no API key, or a wrong or revoked key."""


class OutOfScope(Forbidden):
    """Report that the request's API key is not for this endpoint; the message names the scope."""

    def __init__(self, message: str, key: str) -> None:
        """Store the message, and the name of the key."""
        super().__init__(message, code="missing_scope")
        self.key = key


class TooMany(ProxyError, status=429, fault="client", kind="rate_limit_error"):
    """Report that the request would exceed a limit of its API key."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        """Store the message, and the seconds until the request would be admitted."""
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class BadRequest(ProxyError, status=400, fault="client", kind="invalid_request_error"):
    """Report that the request cannot be understood; the message says what is wrong in it."""


class KeyReused(BadRequest, status=409):
    """Report that an idempotency key was already used for another body."""


class TooSlow(BadRequest, status=408):
    """Report that the request's body came more slowly than `PAWL_BODY_S` allows."""


class Unexpected(ProxyError):
    """Report that the proxy failed unexpectedly; the log has the traceback."""


class TooLarge(BadRequest, status=413):
    """Report that the request's body is larger than its limit, or holds too many values."""


class Overloaded(ProxyError, status=503, kind="overloaded_error", retry_after_s=1):
    """Report that the memory budget `PAWL_IN_FLIGHT_MB` has no room for the request now."""


class KeysUnknown(ProxyError, status=503, retry_after_s=2):
    """Report that the proxy cannot read the API keys now, so it admits no request."""


class NoUpstream(BadRequest, status=404):
    """Report that no upstream serves the requested model."""


class NotServed(BadRequest, status=404):
    """Report that the model server does not have the policy version that the request names."""


class NotContinued(BadRequest, status=404):
    """Report that the call continues a response that is not known to be its tenant's."""


class NotKnownNow(ProxyError, status=503, retry_after_s=2):
    """Report that the tenant of a response is unknown for now: the database does not answer."""


class NotLoaded(ProxyError, status=503, fault="upstream", kind="upstream_error", retry_after_s=2):
    """Report that no replica of the model server has the serving version loaded, for now."""


class UpstreamUnreachable(ProxyError, status=502, fault="upstream", kind="upstream_error"):
    """Report that no connection to the upstream could be made."""


class UpstreamBroke(ProxyError, status=502, fault="upstream", kind="upstream_error"):
    """Report that the connection broke after the request was sent, and before any reply."""


class ReplyTorn(UpstreamBroke):
    """Report that an upstream's reply broke off before any of it was sent to the client."""


class Redirected(ProxyError, status=502, fault="upstream", kind="upstream_error"):
    """Report a redirect that is not passed on: the client would send its Pawl key elsewhere."""


class UnreadableCoding(ProxyError, status=502, fault="upstream", kind="upstream_error"):
    """Report that an upstream's reply has a content coding that the proxy cannot decode."""


class UpstreamSilent(UpstreamBroke, status=504, fault="upstream", kind="upstream_error"):
    """Report that the upstream was silent beyond `PAWL_SILENCE_S` after the request was sent."""


class NoModels(ProxyError, status=502, fault="upstream", kind="upstream_error"):
    """Report that the upstream's answer to a request for its models was not a list of models."""


class SpoolFull(ProxyError, status=507, kind="storage_error"):
    """Report that a record could not be written to disk, as it must be before the answer."""


class SpoolInUse(ProxyError):
    """Report that another process holds the spool directory."""


class DoesNotStart(ProxyError):
    """Report that a process of the proxy ends repeatedly right after its start."""


class BadUpstreams(ProxyError):
    """Report that the file that `PAWL_UPSTREAMS` names cannot be used."""


class BadRedaction(ProxyError):
    """Report that the file that `PAWL_REDACTION` names cannot be used."""


class NoSpans(ProxyError):
    """Report that spans cannot be made or sent as the settings say, although `PAWL_OTEL` is set."""
