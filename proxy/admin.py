"""The admin port: is it alive, is it ready, what does it count."""

import os

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.database import Database
from proxy.drain import Drainer


def admin_app(database: Database, drainer: Drainer) -> web.Application:
    """`/healthz` (the process answers), `/readyz` (calls are taken), `/metrics`."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        # Serving does not depend on the database; an operator wants to see it all the same.
        return web.json_response(
            {
                "status": "ready",
                "database": "up" if database.up else "away: records wait on disk",
                "serving": database.serving,
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


def _registry() -> CollectorRegistry:
    """What all processes of this proxy count together."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
