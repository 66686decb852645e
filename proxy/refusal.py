"""Tells a client what went wrong, in the words of the API it speaks, and whose fault it was."""

from proxy.dialects.errors import error_body
from proxy.errors import ProxyError
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON, Headers


def refuse(
    exchange: Exchange,
    error: ProxyError,
    *,
    dialect: str | None = None,
    headers: Headers | None = None,
) -> None:
    """Answer with an error; `dialect` None: that of the path that was asked."""
    spoken = dialect or ("messages" if "/v1/messages" in exchange.target else "chat")
    body = error_body(spoken, error.message, error.kind, error.param, error.code)
    told: Headers = [JSON, (b"x-pawl-fault", error.fault.encode()), *(headers or [])]
    if error.retry_after_s is not None:
        told.append((b"Retry-After", b"%d" % error.retry_after_s))
    exchange.reply(error.status, b"", told, body)
