"""Serve the admin port: `/healthz`, `/readyz` and `/metrics`."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.error_replies import REFUSALS, REQUIRED_HEADERS
from proxy.errors import ProxyError
from proxy.formats.errors import OPENAI
from proxy.http.server import is_loopback
from proxy.ingester.database import Database
from proxy.ingester.drain import Drainer
from proxy.keys import KeyChecker, Usage, credentials_in
from proxy.metrics import REFUSED, exposed_registry
from proxy.policies.owners import Owners
from proxy.shared_memory import ProcessState, is_shared, readiness
from store.errors import BadPolicies
from store.policy_table import open_policies
from store.tenants import DEFAULT
from store.versions import PolicyVersion

log = structlog.get_logger()

# Identifies a file's content: time of change, inode, and size (a file written in place may change
# twice within a tick of the disk's clock). A word if there is no file, or none was read.
Mark = tuple[int, int, int] | str


class OwnersFile:
    """The policies' tenants by the policies file, which is read again whenever it changes."""

    def __init__(self, path: Path | None) -> None:
        """Store the path of the policies file; the first `current_owners` reads it."""
        self._path = path
        self._seen: Mark = "unread"
        self._trouble = ""
        self._owners = Owners(None)

    def current_owners(self, versions: Iterable[PolicyVersion]) -> Owners:
        """Return the policies' owners, by the policies file and the store's `versions`.

        If the file cannot be used, that is logged once, its last usable content counts, and the
        next call tries again.
        """
        # Look before reading: a file that is replaced in between is read again at the next call.
        mark = self._mark()
        if mark != self._seen:
            try:
                self._owners = Owners(open_policies(self._path))
                self._seen, self._trouble = mark, ""
            except BadPolicies as error:
                # The ingester's other work must not wait for the file.
                if str(error) != self._trouble:
                    log.error("owners_unreadable", reason=str(error))
                self._trouble = str(error)
        self._owners.learn_policies(versions)
        return self._owners

    def _mark(self) -> Mark:
        if self._path is None:
            return "none"
        try:
            status = self._path.stat()
        except OSError:
            return "lost"
        return status.st_mtime_ns, status.st_ino, status.st_size


# The tenant of a request's key.
TENANT: Final = web.RequestKey("tenant", str)
# Load balancers have no keys, and these endpoints show no content.
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
OUTCOMES: Final = ("stored", "dead_lettered", "dropped", "deleted")


def admin_app(
    database: Database,
    drainer: Drainer,
    key_checker: KeyChecker,
    owners: OwnersFile,
    processes: Callable[[], list[ProcessState]] | None = None,
) -> web.Application:
    """Return the admin port's application.

    `/healthz` is 200 while the process answers. `/readyz` is 200 while a worker accepts calls, else
    503; it needs no key, and so shows only the default tenant's policies. `/metrics`, in
    Prometheus's text format, shows everything to the default tenant, which owns the proxy, and to
    any other tenant the series of its own policies. `processes` returns the workers' states; it is
    None if no supervisor runs them.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        known = owners.current_owners(database.versions)
        ready, workers = readiness(None if processes is None else processes())
        serving = {name: one for name, one in database.serving.items() if known.owns(DEFAULT, name)}
        return _ready_reply(database, drainer, ready, workers, serving)

    async def metrics(request: web.Request) -> web.Response:
        # Include every record that was durable before this scrape.
        await drainer.count()
        tenant, is_shown = request[TENANT], None
        if tenant != DEFAULT:
            is_shown = partial(owners.current_owners(database.versions).owns, tenant)
        page = generate_latest(exposed_registry(is_shown))
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(middlewares=[require_read_key(key_checker)])
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app


def require_read_key(key_checker: KeyChecker) -> Middleware:
    """Return the middleware that requires a key with the scope `read`, where keys are required."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        try:
            usage = _begin(key_checker, request)
        except ProxyError as error:
            REFUSED.labels(type(error).__name__).inc()
            REFUSALS.log_error(error, request.path, request.remote)
            return _refusal(error)
        try:
            return await handler(request)
        finally:
            if usage is not None:
                usage.end()

    return admit


def _begin(key_checker: KeyChecker, request: web.Request) -> Usage | None:
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    headers = list(request.raw_headers)
    shown, asked = credentials_in(headers), (request.method, headers)
    grant = key_checker.check(shown, "read", asked, local=is_loopback(peer))
    request[TENANT] = DEFAULT if grant is None else grant.tenant
    return None if grant is None else key_checker.count_request(grant, takes_tokens=False)


def _refusal(error: ProxyError) -> web.Response:
    headers: dict[str, str] = {"x-pawl-fault": error.fault}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    for name, value in REQUIRED_HEADERS.get(error.status, []):
        headers[name.decode()] = value.decode()
    body = OPENAI.body(error.message, error.kind, error.param, error.code)
    return web.Response(
        status=error.status, body=body, headers=headers, content_type="application/json"
    )


def _ready_reply(
    database: Database,
    drainer: Drainer,
    ready: bool,
    workers: object,
    serving: Mapping[str, int],
) -> web.Response:
    """Return the reply of `/readyz`; its status code depends only on `ready`.

    Database and drain are reported, but serving depends on neither, so a load balancer must not
    take the proxy out of rotation for them.
    """
    drain = drainer.progress
    recording_outage_s = drainer.outages.lasts_s
    is_degraded = drain.state == "stuck" or database.refusal or recording_outage_s
    status = "degraded" if is_degraded else "ready"
    why = f"refuses us ({database.refusal})" if database.refusal else "away"
    return web.json_response(
        {
            "status": status if ready else "no worker takes calls now",
            "workers": workers,
            "database": "up" if database.up else f"{why}: records wait on disk",
            "serving": serving,
            "drain": drain.readyz_fields(),
            "recording_outage_s": round(recording_outage_s, 1),
        },
        status=200 if ready else 503,
    )


def count_unsettled() -> int:
    """Return how many records earlier ingesters counted, but did not bring to their end.

    A record ends stored, dead-lettered, dropped or deleted. The result is 0 if counters are not
    shared, as those of earlier ingesters are then unknown.
    """
    if not is_shared():
        return 0
    samples = {s.name: s.value for metric in exposed_registry().collect() for s in metric.samples}
    ended = sum(samples.get(f"pawl_records_{end}_total", 0.0) for end in OUTCOMES)
    return int(samples.get("pawl_records_total", 0.0) - ended)
