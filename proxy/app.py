"""Puts the proxy together, runs it, and takes it apart in the right order."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from proxy.admin import admin_app
from proxy.database import Database
from proxy.drain import Drainer
from proxy.errors import ProxyError, error_body
from proxy.feedback import FeedbackDesk
from proxy.forward import forward
from proxy.metrics import RECORDED, REFUSED, SPOOLED
from proxy.recent import Recent
from proxy.recorder import Recorder
from proxy.relay import Relay
from proxy.routes import Kind, find_route
from proxy.settings import ProxySettings
from proxy.spool import Spool
from proxy.upstream import Upstream
from proxy.versions import Versions
from store.away import is_away
from store.settings import address

log = structlog.get_logger()

DRAIN_AT_EXIT_S = 5.0


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def data_handler(relay: Relay, desk: FeedbackDesk) -> Handler:
    """The data port: every request goes through the allow-list, the only router there is."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        try:
            route = find_route(request.method, request.raw_path.partition("?")[0])
            if route.kind is Kind.CALL:
                return await relay.handle(request, route)
            if route.kind is Kind.FEEDBACK:
                return await desk.handle(request)
            return await forward(request, route, relay.upstream)
        except ProxyError as error:
            REFUSED.labels(type(error).__name__).inc()
            return web.Response(
                status=error.status,
                body=error_body(error),
                content_type="application/json",
                headers={"x-pawl-fault": error.fault},
            )

    return handle


@asynccontextmanager
async def running(settings: ProxySettings) -> AsyncIterator[None]:
    """A whole proxy: up when entered, drained and closed when left.

    Raises:
        SpoolInUse: another process holds the spool directory.
        OSError: a port is taken.
    """
    spool = Spool(settings.spool_dir, segment_bytes=settings.segment_mb * 2**20)
    versions = Versions()
    recent = Recent()
    recorder = Recorder(spool, recent, default_temperature=settings.default_temperature)
    async with Upstream(str(settings.upstream_url)) as upstream:
        database = Database(settings, versions, upstream)
        relay = Relay(upstream, versions, recorder)
        desk = FeedbackDesk(recorder, recent, database.engine)
        drainer = Drainer(spool, database.engine, batch=settings.drain_batch)
        waiting = drainer.count_waiting()
        RECORDED.inc(waiting)
        SPOOLED.inc(waiting)
        watching = asyncio.create_task(database.run(), name="pawl-database")
        draining = asyncio.create_task(drainer.run(), name="pawl-drain")
        data = _data_runner(data_handler(relay, desk), settings)
        runners: list[web.BaseRunner] = [data, web.AppRunner(admin_app(database))]
        try:
            for runner, listen in zip(
                runners, (settings.listen, settings.admin_listen), strict=True
            ):
                await _listen(runner, listen)
            log.info("proxy_up", listen=settings.listen, spooled=waiting)
            yield
        finally:
            for runner in runners:
                await runner.cleanup()
            await relay.drain()
            drainer.stop()
            await asyncio.wait([draining])
            await _drain_rest(drainer)
            database.stop()
            await asyncio.wait([watching])
            await database.close()
            spool.close()
            log.info("proxy_down")


async def _drain_rest(drainer: Drainer) -> None:
    """Store what is left, for a few seconds; the next start stores the rest."""
    try:
        async with asyncio.timeout(DRAIN_AT_EXIT_S):
            while await drainer.drain_once():
                pass
    except Exception as error:
        if not is_away(error):
            raise
        log.warning("spool_left", reason=type(error).__name__)


def _data_runner(handle: Handler, settings: ProxySettings) -> web.ServerRunner:
    server = web.Server(
        handle,
        request_factory=partial(_make_request, settings.max_body_mb * 2**20),
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        max_line_size=65536,
        max_field_size=65536,
    )
    return web.ServerRunner(server, shutdown_timeout=30.0)


def _make_request(max_size: int, *parts: Any) -> web.BaseRequest:
    message, payload, protocol, writer, task = parts
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_size)


async def _listen(runner: web.BaseRunner, listen: str) -> None:
    await runner.setup()
    host, port = address(listen)
    await web.TCPSite(runner, host, port, backlog=1024).start()


async def serve(settings: ProxySettings) -> None:
    """Run until SIGTERM or SIGINT; calls under way are finished first."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    # What is there now lives as long as the process: the collector need not look at it again.
    gc.freeze()
    async with running(settings):
        await stop.wait()
