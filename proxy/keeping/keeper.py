"""The process beside the workers that keeps their records: drains, watches, counts, migrates.

Serving needs none of it: while the keeper is away, records wait on disk.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from aiohttp import web

from proxy.counting.board import ProcessState
from proxy.errors import SpoolInUse
from proxy.keeping.admin import admin_app, unsettled
from proxy.keeping.cleaning import clean_keys
from proxy.keeping.database import Database
from proxy.keeping.drain import Drainer
from proxy.settings import ProxySettings
from proxy.spooling.folders import PRIVATE, Lock, hold
from store.away import is_away
from store.settings import address

log = structlog.get_logger()

DRAIN_AT_EXIT_S = 5.0
LOOK_S = 0.1


@asynccontextmanager
async def keeping(
    settings: ProxySettings,
    *,
    patience_s: float = 0.0,
    processes: Callable[[], list[ProcessState]] | None = None,
) -> AsyncIterator[None]:
    """A keeper: up when entered; what is spooled is stored, if it can be, when left.

    For `patience_s` another keeper that has the spool directory is waited for. `processes` tells
    of the workers, where a supervisor keeps them up.

    Raises:
        SpoolInUse: another keeper has the spool directory.
        OSError: the admin port is taken.
    """
    # Records hold prompts; whoever made the folder before decided who may look into it.
    settings.spool_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    lock = await _hold_patiently(settings.spool_dir / "lock", patience_s)
    database = Database(settings)
    drainer = Drainer(
        settings.spool_dir,
        database.engine,
        batch=settings.drain_batch,
        readers=settings.tool_results,
        counted_before=unsettled(),
        most_reply=settings.max_reply_mb * 2**20,
    )
    admin = web.AppRunner(admin_app(database, drainer, processes), access_log=None)
    await admin.setup()
    host, port = address(settings.admin_listen)
    await web.TCPSite(admin, host, port).start()
    watching = asyncio.create_task(database.run(), name="pawl-database")
    draining = asyncio.create_task(drainer.run(), name="pawl-drain")
    cleaning = asyncio.create_task(
        clean_keys(settings.spool_dir, database.engine), name="pawl-clean-keys"
    )
    log.info("keeper_up", admin=settings.admin_listen)
    try:
        yield
    finally:
        cleaning.cancel()
        drainer.stop()
        await asyncio.wait([draining, cleaning])
        await _drain_rest(drainer, min(DRAIN_AT_EXIT_S, settings.last_drain_s))
        database.stop()
        await asyncio.wait([watching])
        await database.close()
        await admin.cleanup()
        lock.release()
        log.info("keeper_down")


async def _hold_patiently(path: Path, patience_s: float) -> Lock:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            return hold(path)
        except SpoolInUse:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(LOOK_S)


async def _drain_rest(drainer: Drainer, within_s: float) -> None:
    """Store what is left, for a few seconds; the next start stores the rest."""
    try:
        async with asyncio.timeout(within_s):
            while await drainer.drain_once():
                pass
    except Exception as error:
        # Whatever it is, the rest of the keeper ends in order.
        tell = log.warning if is_away(error) else log.exception
        tell("spool_left", reason=type(error).__name__)
