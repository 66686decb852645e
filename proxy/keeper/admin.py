"""Serve the admin port: `/healthz`, `/readyz` and `/metrics`."""

from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.counting.board import ProcessState, readiness
from proxy.counting.shared import is_shared
from proxy.keeper.database import Database
from proxy.keeper.drain import Drainer
from proxy.metrics import exposed

ENDS: Final = ("stored", "dead_lettered", "dropped")


def admin_app(
    database: Database,
    drainer: Drainer,
    processes: Callable[[], list[ProcessState]] | None = None,
) -> web.Application:
    """Return the admin port's application.

    `/healthz` is 200 while the process answers. `/readyz` is 200 while a worker takes calls and
    503 otherwise. `/metrics` is in Prometheus's text format.

    Args:
        database: reported by `/readyz`.
        drainer: reported by `/readyz`; it counts the spool before each `/metrics`.
        processes: returns the workers' states; None if no supervisor runs them.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        # Database and drain are reported and do not change the status code: serving depends on
        # neither, so a load balancer must not take the proxy out of rotation for them.
        ready, workers = readiness(None if processes is None else processes())
        drain = drainer.progress
        degraded = drain.state == "stuck" or database.refusal
        return web.json_response(
            {
                "status": _status(ready=ready, degraded=bool(degraded)),
                "workers": workers,
                "database": _told(database),
                "serving": database.serving,
                "drain": drain.told(),
            },
            status=200 if ready else 503,
        )

    async def metrics(_: web.Request) -> web.Response:
        # Include every record that was durable before this scrape.
        await drainer.count()
        return web.Response(
            body=generate_latest(exposed()), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app


def _status(*, ready: bool, degraded: bool) -> str:
    if not ready:
        return "no worker takes calls now"
    return "degraded" if degraded else "ready"


def _told(database: Database) -> str:
    if database.up:
        return "up"
    why = f"refuses us ({database.refusal})" if database.refusal else "away"
    return f"{why}: records wait on disk"


def unsettled() -> int:
    """Return the number of records that earlier keepers counted and that have not ended yet.

    A record ends stored, dead-lettered or dropped. The number is 0 where counters are not shared:
    no earlier keeper's are known then.
    """
    if not is_shared():
        return 0
    samples = {s.name: s.value for metric in exposed().collect() for s in metric.samples}
    ended = sum(samples.get(f"pawl_records_{end}_total", 0.0) for end in ENDS)
    return int(samples.get("pawl_records_total", 0.0) - ended)
