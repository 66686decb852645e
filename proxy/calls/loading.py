"""Let a call wait for a version that the model server does not have yet, for a bounded time.

The store lists the version as servable, so its adapter is being loaded (`pawl steward`), or another
replica has it. A server that does not know a model has not worked on the request, which may be sent
again.
"""

import asyncio
from typing import Final

import structlog

from proxy.calls.asking import Arrived
from proxy.calls.routing import CallRouter, Routed, send_where_served
from proxy.errors import NotLoaded, NotServed
from proxy.metrics import WAITED_FOR_ADAPTER
from proxy.upstreams.model_server import ModelServer, Reply

log = structlog.get_logger()

# A steward looks twice a second, and an adapter is loaded in less than a second or two.
WAIT_S: Final = 10.0
LOOK_AGAIN_S: Final = 0.25


async def when_loaded(
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
