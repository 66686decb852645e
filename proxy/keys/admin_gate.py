"""Check keys on the admin port, which aiohttp serves, and hold them to their limits there."""

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from proxy.door.refusal import CHALLENGE, UNAUTHORIZED
from proxy.errors import ProxyError
from proxy.formats.errors import OPENAI
from proxy.http.peers import is_loopback
from proxy.keys.gate import Gate, shown_in
from proxy.keys.limits import Usage
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
        if request.path in OPEN:
            return await handler(request)
        try:
            usage = _begun(gate, request)
        except ProxyError as error:
            REFUSED.labels(type(error).__name__).inc()
            return _refusal(error)
        try:
            return await handler(request)
        finally:
            if usage is not None:
                usage.end()

    return admit


def _begun(gate: Gate, request: web.Request) -> Usage | None:
    """Let a request in, with whose it is; return whom to tell that it has ended, if anybody.

    Raises:
        ProxyError: it is not let in, as `Gate.check` and `Gate.begin` say.
    """
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    grant = gate.check(shown_in(list(request.raw_headers)), "read", local=is_loopback(peer))
    request[TENANT] = DEFAULT if grant is None else grant.tenant
    return None if grant is None else gate.begin(grant, takes_tokens=False)


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
