"""Run the controller's process: start it, answer on its port, and stop it at a signal."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine

from controller.evaluating import Evaluations, evaluate_candidate
from controller.gate import Gate
from controller.publishing import Publishing
from controller.replicas import ReplicaController, ServableVersions, show_troubles
from pawl.database import open_engine
from pawl.processes import stop_event
from pawl.settings import ControllerSettings
from store.admin_port import serve_app
from store.database import explain_error, prevents_all_storing
from store.metrics import show_version
from store.settings import StoreSettings
from trainer.publishing.model_server import Replicas
from trainer.publishing.sources import reader_files

log = structlog.get_logger()


async def controller(settings: ControllerSettings) -> None:
    """Publish, load and judge versions, until SIGTERM or SIGINT.

    Raises:
        NotListening: the controller's port cannot be listened on.
        TrainerError: PAWL_ADAPTER_SOURCE cannot be used.
    """
    stop = stop_event()
    poll_s = settings.controller_poll_s
    async with AsyncExitStack() as exits:
        replicas = await exits.enter_async_context(
            Replicas(settings.server_urls, settings.adapter_slots, reader_files(settings))
        )
        servable, evaluations = ServableVersions(), Evaluations(evaluate_candidate)
        publishing = Publishing(replicas)
        controllers = [ReplicaController(server, servable, poll_s) for server in replicas.each]
        show_version()
        app, hosts = app_of(servable, controllers, publishing), settings.allowed_hosts
        listen = settings.controller_listen
        port = await serve_app(app, listen, "PAWL_CONTROLLER_LISTEN", hosts)
        exits.push_async_callback(port.cleanup)
        exits.push_async_callback(evaluations.close)
        exits.push_async_callback(publishing.close)
        looks = {
            "controller": servable.look,
            "publishing": publishing.look,
            "gate": Gate(evaluations).look,
        }
        reading = [look_forever(settings, poll_s, name, look) for name, look in looks.items()]
        async with working(reading), working([each.reconcile_forever() for each in controllers]):
            log.info("controller_up", replicas=settings.server_urls)
            await stop.wait()
    log.info("controller_down")


@asynccontextmanager
async def working(parts: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run these coroutines as tasks; cancel them when the block ends, and wait for them.

    Tasks of replicas use the engine of the task that reads the store, and must end before it.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def look_forever(
    settings: StoreSettings,
    poll_s: float,
    name: str,
    look: Callable[[AsyncEngine], Awaitable[None]],
) -> None:
    """Call `look` every `poll_s` seconds; never return.

    A failure is logged when it begins, and when it changes between an absent database and any other
    failure.
    """
    trouble: str | None = None
    while True:
        try:
            async with open_engine(settings, create=True) as engine:
                while True:
                    await look(engine)
                    if trouble is not None:
                        log.info(f"{name}_reads_database")
                    trouble = None
                    await asyncio.sleep(poll_s)
        except Exception as error:
            is_away, before = prevents_all_storing(error), trouble
            trouble = f"{name}_waits_for_database" if is_away else f"{name}_fails"
            if trouble != before:
                write = log.warning if is_away else log.exception
                write(trouble, reason=f"{type(error).__name__}: {explain_error(error)}")
        await asyncio.sleep(poll_s)


def app_of(
    servable: ServableVersions, controllers: Sequence[ReplicaController], publishing: Publishing
) -> web.Application:
    """Return the port's application: `/healthz` and `/readyz` are 200 while the process works.

    `/readyz` says why versions are not loaded or not published, and whether the database is up:
    restarting the controller would help with neither.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(_: web.Request) -> web.Response:
        show_troubles(controllers)
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def readyz(_: web.Request) -> web.Response:
        reasons = {**show_troubles(controllers), "waiting": publishing.waiting}
        is_degraded = any(reasons.values()) or not servable.up
        return web.json_response(
            {
                "status": "degraded" if is_degraded else "ready",
                "database": "up" if servable.up else "away",
                **reasons,
            }
        )

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app
