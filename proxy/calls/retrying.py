"""Decide when a call that was refused is sent again: elsewhere, later, or as it came.

- Its version is being loaded (`pawl steward`), or another replica has it: the store lists it as
  servable, and a server that does not know a model has not worked on the request. The call waits,
  for a bounded time.
- It was refused as malformed, with fields that the proxy added: it is sent as the client wrote it.

Which replica gets a request that could not be sent at all is decided in `proxy.upstreams.server`.
Nothing else is ever sent twice: a model must not answer one call two times.
"""

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from proxy.errors import NotLoaded, NotServed
from proxy.metrics import WAITED_FOR_ADAPTER
from proxy.upstreams.replies import Reply
from proxy.upstreams.upstreams import ModelServer

if TYPE_CHECKING:
    from proxy.calls.call import Call

log = structlog.get_logger()

# A steward looks twice a second, and an adapter is loaded in less than a second or two.
WAIT_S: Final = 10.0
LOOK_AGAIN_S: Final = 0.25
# The status by which a model server says that it has no such model.
UNKNOWN_MODEL: Final = 404
REFUSED_AS_MALFORMED: Final = (400, 422)


async def past_refusal(call: "Call", upstream: ModelServer, refusal: Reply) -> Reply:
    """Send a call that was refused again where that can help, and return the last reply.

    Raises:
        ProxyError: it was sent again, and no reply came; or its version cannot be had.
    """
    reply = await _once_loaded(call, upstream, refusal)
    if reply.status in REFUSED_AS_MALFORMED and call.routed.request.injected:
        # Nothing that the proxy adds can fail a call so, and a refusal is about the client's
        # request. Changed before it is sent: the record of a call that fails now says what was
        # sent last.
        call.send_as_it_came()
        # A server may close after a refusal without announcing it: use another connection.
        reply.discard()
        reply = await _once_loaded(call, upstream, await call.send(upstream))
    return reply


async def _once_loaded(call: "Call", upstream: ModelServer, reply: Reply) -> Reply:
    """Return the reply of a server that has the call's version, if this one's lacks it."""
    if reply.status != UNKNOWN_MODEL or not call.parts.versions.is_servable(call.routed.serving):
        return reply
    reply.discard()
    return await _when_loaded(call, upstream)


async def _when_loaded(call: "Call", upstream: ModelServer) -> Reply:
    """Send a call to a replica that has its version, as soon as there is one.

    What a server that lists the version replies is final, whatever it is. A version that is retired
    meanwhile is not waited for.

    Raises:
        NotServed: the request names a version that was retired meanwhile.
        NotLoaded: no replica has the version within `WAIT_S`.
        ProxyError: the call was sent, and no reply came.
    """
    versions, serving = call.parts.versions, call.routed.serving
    name = serving.served_name or ""
    clock = asyncio.get_running_loop().time
    begun = clock()
    while True:
        reply = await upstream.ask_where_served(name, "POST", *call.outgoing())
        waited_s = clock() - begun
        is_awaited = versions.is_servable(serving)
        if reply is not None or waited_s >= WAIT_S or not is_awaited:
            break
        await asyncio.sleep(LOOK_AGAIN_S)
    WAITED_FOR_ADAPTER.labels("served" if reply is not None else "given_up").inc()
    log.info("adapter_waited_for", call=call.name, version=name, s=round(waited_s, 2))
    if reply is not None:
        return reply
    why = call.why_not_served()
    if why is not None:
        raise NotServed(why, param="model", code="model_not_found")
    after = (
        f"was not given it within {WAIT_S:.0f} s. It is being loaded again"
        if is_awaited
        else "it was retired meanwhile; another version serves"
    )
    raise NotLoaded(
        f"The model server does not have {name} now, and {after}: repeat the request",
        code="version_not_loaded",
    )
