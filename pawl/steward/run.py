"""Run the steward's process: start it, answer on its port, and stop it at a signal."""

import asyncio
import shlex
from contextlib import AsyncExitStack
from typing import Final

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pawl.judging.program import ProgramJudge
from pawl.settings import StewardSettings
from pawl.signals import stop_event
from pawl.steward.gating import Gating
from pawl.steward.known import Known
from pawl.steward.replica import ReplicaKeeper
from proxy.admin_port import listen_on
from trainer.publishing.replicas import Replicas

log = structlog.get_logger()

# A judgement of a replay's answer that takes longer is none.
JUDGEMENT_S: Final = 60.0


async def steward(settings: StewardSettings) -> None:
    """Keep every replica's adapters loaded, and judge versions, until SIGTERM or SIGINT.

    Raises:
        OSError: its port cannot be listened on.
        JudgeError: the program that is to score replays is not there.
    """
    judge = None
    if settings.replay_judge_command is not None:
        command = shlex.split(settings.replay_judge_command)
        judge = ProgramJudge(command, timeout_s=JUDGEMENT_S)
    stop = stop_event()
    async with AsyncExitStack() as exits:
        known = Known(settings, settings.steward_poll_s)
        port = await listen_on(app_of(known), settings.steward_listen)
        exits.push_async_callback(port.cleanup)
        replicas = await exits.enter_async_context(
            Replicas(settings.server_urls, settings.adapter_slots)
        )
        poll_s = settings.steward_poll_s
        work = [known.follow(), Gating(settings, poll_s, replicas, judge).follow()]
        work += [ReplicaKeeper(server, known, poll_s).keep() for server in replicas.each]
        tasks = [asyncio.create_task(one) for one in work]
        log.info("steward_up", replicas=settings.server_urls)
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    log.info("steward_down")


def app_of(known: Known) -> web.Application:
    """Return what the port answers: `/healthz` and `/readyz` are 200 while the process works.

    `/readyz` says why versions are not loaded, and whether the database is there: no restart of the
    steward would help with either.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def readyz(_: web.Request) -> web.Response:
        degraded = known.altered or known.unread or known.misserved or not known.up
        return web.json_response(
            {
                "status": "degraded" if degraded else "ready",
                "database": "up" if known.up else "away",
                "altered": known.altered,
                "unread": known.unread,
                "misserved": known.misserved,
            }
        )

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app
