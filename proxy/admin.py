"""The admin port: is it alive, is it ready, what does it count."""

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.database import Database


def admin_app(database: Database) -> web.Application:
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
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app
