"""Run the steward's process: start it, answer on its port, and stop it at a signal."""

import asyncio
import signal
from contextlib import AsyncExitStack

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pawl.settings import StewardSettings
from pawl.steward.known import Known
from pawl.steward.replica import ReplicaKeeper
from store.settings import address
from trainer.publishing.server import ModelServer

log = structlog.get_logger()


async def steward(settings: StewardSettings) -> None:
    """Keep every replica's adapters loaded until SIGTERM or SIGINT.

    Raises:
        OSError: its port cannot be listened on.
    """
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with AsyncExitStack() as exits:
        await _listen(exits, settings)
        known = Known(settings, settings.steward_poll_s)
        work = [known.follow()]
        for url in settings.server_urls:
            server = await exits.enter_async_context(ModelServer(url))
            work.append(ReplicaKeeper(server, known, settings.steward_poll_s).keep())
        tasks = [asyncio.create_task(one) for one in work]
        log.info("steward_up", replicas=settings.server_urls)
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    log.info("steward_down")


async def _listen(exits: AsyncExitStack, settings: StewardSettings) -> None:
    """Answer `/healthz` and `/metrics` until `exits` is left."""
    runner = web.AppRunner(_app(), access_log=None)
    await runner.setup()
    exits.push_async_callback(runner.cleanup)
    host, port = address(settings.steward_listen)
    await web.TCPSite(runner, host, port).start()


def _app() -> web.Application:
    """Return what the port answers: `/healthz` is 200 while the process works."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", metrics)
    return app
