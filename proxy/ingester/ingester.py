"""Run the process beside the workers: drain their spool, migrate the database, serve metrics.

Serving does not need it: while the ingester is away, records wait on disk.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from proxy.admin_port import listen_on
from proxy.errors import SpoolInUse
from proxy.ingester.admin import admin_app, unsettled
from proxy.ingester.cleaning import clean_keys
from proxy.ingester.database import Database
from proxy.ingester.drain import Drainer
from proxy.ingester.evaluating import show_evaluations
from proxy.ingester.owning import OwnersFile
from proxy.ingester.removing.deleted import keep_deleted
from proxy.ingester.removing.outdated import remove_outdated
from proxy.keys.gate import Gate, KeyFile
from proxy.redaction import Redactor, open_redactor
from proxy.settings import ProxySettings
from proxy.shared_memory import ProcessState
from proxy.spool.folders import PRIVATE, Lock, hold
from store.connection.availability import is_no_records_fault

log = structlog.get_logger()

DRAIN_AT_EXIT_S = 5.0
LOOK_S = 0.1


@asynccontextmanager
async def ingesting(
    settings: ProxySettings,
    *,
    patience_s: float = 0.0,
    processes: Callable[[], list[ProcessState]] | None = None,
) -> AsyncIterator[None]:
    """Run an ingester: it works when the context is entered, and drains what it can when left.

    Args:
        settings: the proxy's settings.
        patience_s: how long to wait for another ingester to release the spool directory.
        processes: returns the workers' states; None if no supervisor runs them.

    Raises:
        SpoolInUse: another ingester holds the spool directory.
        OSError: the admin port is taken.
        BadRedaction: the file of rules cannot be used.
    """
    redactor = open_redactor(settings)
    # Records hold prompts, so a new folder is private. An existing one keeps its owner's choice.
    settings.spool_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    lock = await _hold_patiently(settings.spool_dir / "lock", patience_s)
    try:
        async with _working(settings, redactor, processes):
            yield
    finally:
        lock.release()
        log.info("ingester_down")


@asynccontextmanager
async def _working(
    settings: ProxySettings,
    redactor: Redactor | None,
    processes: Callable[[], list[ProcessState]] | None,
) -> AsyncIterator[None]:
    """Do an ingester's work in a spool directory that it holds."""
    database = Database(settings)
    drainer = _drainer(settings, database, redactor)
    gate, key_file = Gate(settings.access), KeyFile(settings.spool_dir)
    gate.take(key_file.read())
    owners = OwnersFile(settings.policies)
    app = admin_app(database, drainer, gate, owners, processes)
    admin = await listen_on(app, settings.admin_listen)
    keys = asyncio.create_task(key_file.watch(gate.take), name="pawl-keys")
    watching = asyncio.create_task(database.run(), name="pawl-database")
    draining = asyncio.create_task(drainer.run(), name="pawl-drain")
    aside = _aside(settings, database)
    log.info("ingester_up", admin=settings.admin_listen)
    try:
        yield
    finally:
        for task in aside:
            task.cancel()
        await _drain_rest(drainer, draining, min(DRAIN_AT_EXIT_S, settings.last_drain_s))
        await asyncio.wait(aside)
        database.stop()
        await asyncio.wait([watching])
        await database.close()
        await admin.cleanup()
        keys.cancel()
        await asyncio.wait([keys])


def _aside(settings: ProxySettings, database: Database) -> list[asyncio.Task[None]]:
    """Begin what an ingester does beside draining; each task runs until it is cancelled."""
    root, connect = settings.spool_dir, database.engine
    work = {
        "clean-keys": clean_keys(root, connect),
        "evaluations": show_evaluations(connect),
        "deleted": keep_deleted(root, connect),
    }
    if settings.keep_days is not None:
        work["outdated"] = remove_outdated(root, connect, settings.keep_days)
    return [asyncio.create_task(task, name=f"pawl-{name}") for name, task in work.items()]


def _drainer(settings: ProxySettings, database: Database, redactor: Redactor | None) -> Drainer:
    return Drainer(
        settings.spool_dir,
        database.engine,
        batch=settings.drain_batch,
        readers=settings.tool_results,
        counted_before=unsettled(),
        most_reply=settings.max_reply_mb * 2**20,
        redactor=redactor,
    )


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


async def _drain_rest(drainer: Drainer, draining: asyncio.Task[None], within_s: float) -> None:
    """Drain for at most `within_s` seconds, with the batch under way; the next start goes on."""
    drainer.stop()
    try:
        async with asyncio.timeout(within_s):
            await draining
            while await drainer.drain_once():
                pass
    except Exception as error:
        # The rest of the ingester must still shut down in order.
        note = log.warning if is_no_records_fault(error) else log.exception
        note("spool_left", reason=type(error).__name__)
