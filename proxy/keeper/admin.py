"""Serve the admin port: `/healthz`, `/readyz` and `/metrics`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.counting.board import ProcessState, readiness
from proxy.counting.shared import is_shared
from proxy.counting.totals import only_of
from proxy.keeper.database import Database
from proxy.keeper.drain import Drainer
from proxy.keeper.owning import OwnersFile
from proxy.keys.admin_gate import TENANT, guarded_by
from proxy.keys.gate import Gate
from proxy.metrics import exposed
from store.tenants import DEFAULT

ENDS: Final = ("stored", "dead_lettered", "dropped", "deleted")


def admin_app(
    database: Database,
    drainer: Drainer,
    gate: Gate,
    owners: OwnersFile,
    processes: Callable[[], list[ProcessState]] | None = None,
) -> web.Application:
    """Return the admin port's application.

    `/healthz` is 200 while the process answers. `/readyz` is 200 while a worker takes calls and
    503 otherwise; it asks for no key, and so tells of no tenant's policies but the default one's.
    `/metrics` is in Prometheus's text format: all of it for the default tenant, whose the proxy is,
    and for any other the series of its own policies.

    Args:
        database: reported by `/readyz`.
        drainer: reported by `/readyz`; it counts the spool before each `/metrics`.
        gate: checks keys where anything but health is asked for.
        owners: tells whose the policies are.
        processes: returns the workers' states; None if no supervisor runs them.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        known = owners.now(database.versions)
        ready, workers = readiness(None if processes is None else processes())
        serving = {name: one for name, one in database.serving.items() if known.owns(DEFAULT, name)}
        return _ready_reply(database, drainer, ready, workers, serving)

    async def metrics(request: web.Request) -> web.Response:
        # Include every record that was durable before this scrape.
        await drainer.count()
        tenant, page = request[TENANT], exposed()
        if tenant != DEFAULT:
            page = only_of(page, partial(owners.now(database.versions).owns, tenant))
        return web.Response(
            body=generate_latest(page), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application(middlewares=[guarded_by(gate)])
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app


def _ready_reply(
    database: Database,
    drainer: Drainer,
    ready: bool,
    workers: object,
    serving: Mapping[str, int],
) -> web.Response:
    """Return the reply of `/readyz`.

    Database and drain are reported and do not change the status code: serving depends on neither,
    so a load balancer must not take the proxy out of rotation for them.
    """
    drain = drainer.progress
    lapse_s = drainer.lapses.lasts_s
    degraded = drain.state == "stuck" or database.refusal or lapse_s
    return web.json_response(
        {
            "status": _status(ready=ready, degraded=bool(degraded)),
            "workers": workers,
            "database": _database_state(database),
            "serving": serving,
            "drain": drain.told(),
            "lapse_s": round(lapse_s, 1),
        },
        status=200 if ready else 503,
    )


def _status(*, ready: bool, degraded: bool) -> str:
    if not ready:
        return "no worker takes calls now"
    return "degraded" if degraded else "ready"


def _database_state(database: Database) -> str:
    if database.up:
        return "up"
    why = f"refuses us ({database.refusal})" if database.refusal else "away"
    return f"{why}: records wait on disk"


def unsettled() -> int:
    """Return the number of records that earlier keepers counted and that have not ended yet.

    A record ends stored, dead-lettered, dropped or deleted. The number is 0 where counters are not
    shared: no earlier keeper's are known then.
    """
    if not is_shared():
        return 0
    samples = {s.name: s.value for metric in exposed().collect() for s in metric.samples}
    ended = sum(samples.get(f"pawl_records_{end}_total", 0.0) for end in ENDS)
    return int(samples.get("pawl_records_total", 0.0) - ended)
