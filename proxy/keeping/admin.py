"""The admin port: is it alive, is it ready, what does it count."""

import os
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.keeping.database import Database
from proxy.keeping.drain import Drainer

MULTIPROCESS: Final = "PROMETHEUS_MULTIPROC_DIR"
ENDS: Final = ("stored", "dead_lettered", "dropped")


def admin_app(database: Database, drainer: Drainer) -> web.Application:
    """`/healthz` (the process answers), `/readyz` (calls are taken), `/metrics`."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        # Serving depends neither on the database nor on the drain, so that no balancer should
        # take the proxy away for them (200); an operator wants to see them all the same.
        drain = drainer.progress
        return web.json_response(
            {
                "status": "degraded" if drain.state == "stuck" else "ready",
                "database": "up" if database.up else "away: records wait on disk",
                "serving": database.serving,
                "drain": drain.told(),
            }
        )

    async def metrics(_: web.Request) -> web.Response:
        # So that what was made durable before this scrape is in it.
        await drainer.count()
        return web.Response(
            body=generate_latest(_registry()), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app


def unsettled() -> int:
    """How many records earlier keepers of this proxy counted that have not ended anywhere yet."""
    if MULTIPROCESS not in os.environ:
        return 0
    samples = {s.name: s.value for metric in _registry().collect() for s in metric.samples}
    ended = sum(samples.get(f"pawl_records_{how}_total", 0.0) for how in ENDS)
    return int(samples.get("pawl_records_total", 0.0) - ended)


def _registry() -> CollectorRegistry:
    """What all processes of this proxy count together."""
    if MULTIPROCESS not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
