"""Tells a client what went wrong, in the words of the API it speaks, and whose fault it was."""

from typing import Final

from proxy.dialects.errors import error_body
from proxy.errors import ProxyError
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON, Headers

# Goes with an error that is passed on as the upstream said it, whatever it was about.
UPSTREAM_SAID: Final = (b"x-pawl-fault", b"upstream")


def refuse(
    exchange: Exchange,
    error: ProxyError,
    *,
    dialect: str | None = None,
    headers: Headers | None = None,
) -> None:
    """Answer with an error; `dialect` None: that of the path that was asked."""
    spoken = dialect or ("messages" if "/v1/messages" in exchange.target else "chat")
    body = error_body(
        spoken, error.message, error.kind, error.param, error.code, status=error.status
    )
    fault = (b"x-pawl-fault", error.fault.encode())
    exchange.reply(error.status, b"", [JSON, fault, *(headers or [])], body)
