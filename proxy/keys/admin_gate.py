"""Check keys on the admin port, which aiohttp serves."""

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from proxy.door.refusal import CHALLENGE, UNAUTHORIZED
from proxy.errors import ProxyError
from proxy.formats.errors import OPENAI
from proxy.http.peers import is_loopback
from proxy.keys.gate import Gate, shown_in
from proxy.metrics import REFUSED
from store.tenants import DEFAULT

# Whose key a request shows.
TENANT: Final = web.RequestKey("tenant", str)
# Load balancers have no keys, and these have no content of anybody.
OPEN: Final = frozenset({"/healthz", "/readyz"})


def guarded_by(gate: Gate) -> Middleware:
    """Return the middleware that lets a request in with a key for `read`."""

    @web.middleware
    async def admit(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN:
            shown = shown_in(list(request.raw_headers))
            peer = (
                None if request.transport is None else request.transport.get_extra_info("peername")
            )
            try:
                grant = gate.check(shown, "read", local=is_loopback(peer))
            except ProxyError as error:
                REFUSED.labels(type(error).__name__).inc()
                return _refusal(error)
            request[TENANT] = DEFAULT if grant is None else grant.tenant
        return await handler(request)

    return admit


def _refusal(error: ProxyError) -> web.Response:
    headers: dict[str, str] = {"x-pawl-fault": error.fault}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == UNAUTHORIZED:
        name, value = CHALLENGE
        headers[name.decode()] = value.decode()
    body = OPENAI.body(error.message, error.kind, error.param, error.code)
    return web.Response(
        status=error.status, body=body, headers=headers, content_type="application/json"
    )
