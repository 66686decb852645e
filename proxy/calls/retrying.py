"""Decide when a call that was refused is sent again: elsewhere, later, or as it came.

- Its version is being loaded (`pawl steward`), or another replica has it: the store lists it as
  servable, and a server that does not know a model has not worked on the request. The call waits,
  for a bounded time.
- It was refused as malformed, with fields that the proxy added: it is sent as the client wrote it.

Which replica gets a request that could not be sent at all is decided in `proxy.upstreams.server`.
Nothing else is ever sent twice: a model must not answer one call two times.
"""

import asyncio
from typing import Final

import structlog

from proxy.calls.asking import Arrived
from proxy.calls.routing import CallRouter, Routed, send, send_where_served
from proxy.errors import NotLoaded, NotServed
from proxy.metrics import WAITED_FOR_ADAPTER
from proxy.upstreams.replies import Reply
from proxy.upstreams.upstreams import ModelServer

log = structlog.get_logger()

# A steward looks twice a second, and an adapter is loaded in less than a second or two.
WAIT_S: Final = 10.0
LOOK_AGAIN_S: Final = 0.25
REFUSED_AS_MALFORMED: Final = (400, 422)


def is_refused_for_ours(routed: Routed, reply: Reply) -> bool:
    """Return whether a call may be refused for the fields that the proxy added to it."""
    return reply.status in REFUSED_AS_MALFORMED and bool(routed.request.injected)


async def send_again(
    upstream: ModelServer, arrived: Arrived, routed: Routed, refusal: Reply
) -> Reply:
    """Send a call that was refused as malformed again, on another connection.

    `routed` has the request without what the proxy adds: so nothing of that can fail a call, and a
    refusal is about the client's request.

    Raises:
        ProxyError: no reply came.
    """
    # A server may close after a refusal without announcing it: use another connection.
    refusal.discard()
    return await send(upstream, arrived, routed)


async def once_loaded(
    router: CallRouter, upstream: ModelServer, arrived: Arrived, routed: Routed, reply: Reply
) -> Reply:
    """Return the reply of a server that has the call's version, if this one's lacks it.

    Raises:
        ProxyError: as by `_when_loaded`.
    """
    if not router.lacks_version(routed.serving, reply):
        return reply
    return await _when_loaded(router, upstream, arrived, routed, reply)


async def _when_loaded(
    router: CallRouter, upstream: ModelServer, arrived: Arrived, routed: Routed, refusal: Reply
) -> Reply:
    """Send a call again to a replica that has its version, as soon as there is one.

    `refusal` is the reply that said that there is no such model. What a server that lists the
    version replies is final, whatever it is. A version that is retired meanwhile is not waited for.

    Raises:
        NotServed: the request names a version that was retired meanwhile.
        NotLoaded: no replica has the version within `WAIT_S`.
        ProxyError: the call was sent, and no reply came.
    """
    refusal.discard()
    clock = asyncio.get_running_loop().time
    begun = clock()
    while True:
        reply = await send_where_served(upstream, arrived, routed)
        waited_s = clock() - begun
        is_awaited = router.is_servable(routed.serving)
        if reply is not None or waited_s >= WAIT_S or not is_awaited:
            break
        await asyncio.sleep(LOOK_AGAIN_S)
    name = routed.serving.served_name
    WAITED_FOR_ADAPTER.labels("served" if reply is not None else "given_up").inc()
    log.info("adapter_waited_for", call=arrived.name, version=name, s=round(waited_s, 2))
    if reply is None:
        why = router.why_not_served(arrived, routed.serving)
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
    return reply
