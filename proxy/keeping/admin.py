"""The admin port: is it alive, is it ready, what does it count."""

from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.counting.board import ProcessState, readiness
from proxy.counting.shared import is_shared, registry
from proxy.keeping.database import Database
from proxy.keeping.drain import Drainer

ENDS: Final = ("stored", "dead_lettered", "dropped")


def admin_app(
    database: Database,
    drainer: Drainer,
    processes: Callable[[], list[ProcessState]] | None = None,
) -> web.Application:
    """`/healthz` (the process answers), `/readyz` (calls are taken), `/metrics`.

    `processes` tells of the workers, where a supervisor keeps them up.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        # Serving depends neither on the database nor on the drain, so that no balancer should
        # take the proxy away for them; an operator wants to see them all the same.
        ready, workers = readiness(None if processes is None else processes())
        drain = drainer.progress
        status = "degraded" if drain.state == "stuck" else "ready"
        return web.json_response(
            {
                "status": status if ready else "no worker takes calls now",
                "workers": workers,
                "database": "up" if database.up else "away: records wait on disk",
                "serving": database.serving,
                "drain": drain.told(),
            },
            status=200 if ready else 503,
        )

    async def metrics(_: web.Request) -> web.Response:
        # So that what was made durable before this scrape is in it.
        await drainer.count()
        return web.Response(
            body=generate_latest(registry()), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app


def unsettled() -> int:
    """How many records earlier keepers of this proxy counted that have not ended anywhere yet."""
    if not is_shared():
        return 0
    samples = {s.name: s.value for metric in registry().collect() for s in metric.samples}
    ended = sum(samples.get(f"pawl_records_{how}_total", 0.0) for how in ENDS)
    return int(samples.get("pawl_records_total", 0.0) - ended)
