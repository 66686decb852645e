"""Delete idempotency keys that are a day old, on this machine and in the database.

Export the mean reward of each policy version's evaluation episodes as metrics.

Run the process beside the workers: drain their spool, migrate the database, serve metrics.

Serving does not need it: while the ingester is away, records wait on disk.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.admin_port import listen_on
from proxy.errors import SpoolInUse
from proxy.feedback.idempotency import KeyFiles
from proxy.ingester.admin import OwnersFile, admin_app, unsettled
from proxy.ingester.database import Database
from proxy.ingester.drain import Drainer
from proxy.ingester.removing import remove_deleted_letters, remove_outdated
from proxy.keys.gate import Gate, KeyFile
from proxy.metrics import EVAL_EPISODES, EVAL_REWARD
from proxy.redaction import Redactor, open_redactor
from proxy.settings import ProxySettings
from proxy.shared_memory import ProcessState
from proxy.spool.folders import PRIVATE, Lock, hold
from store.connection.availability import is_no_records_fault, is_unavailable
from store.read.evaluations import Evaluation, evaluations
from store.write.feedback_keys import forget_keys

log = structlog.get_logger()

CLEAN_S: Final = 600.0


async def clean_keys(spool_dir: Path, connect: Callable[[], AsyncEngine | None]) -> None:
    """Delete old keys every `CLEAN_S` seconds, until cancelled."""
    files = KeyFiles(spool_dir)
    while True:
        await asyncio.sleep(CLEAN_S)
        try:
            forgotten = await asyncio.to_thread(files.clean)
            engine = connect()
            if engine is not None:
                async with engine.connect() as connection:
                    forgotten += await forget_keys(connection)
            log.info("idempotency_keys_forgotten", keys=forgotten)
        except Exception as error:
            # This task must not end: old keys are looked for again in any case.
            note = log.warning if is_unavailable(error) else log.exception
            note("idempotency_keys_kept", reason=type(error).__name__)


EVALUATIONS_S: Final = 2.0
# The pause after a look is at least this many times as long as the look, so that very many
# episodes of evaluation do not keep the database busy.
LOOK_SHARE: Final = 20


async def show_evaluations(connect: Callable[[], AsyncEngine | None]) -> None:
    """Bring the metrics up to date every `EVALUATIONS_S` seconds, until cancelled."""
    while True:
        began = perf_counter()
        try:
            engine = connect()
            if engine is not None:
                async with engine.connect() as connection:
                    show(await evaluations(connection))
        except Exception as error:
            # This task must not end: the metrics are brought up to date once the database answers.
            note = log.warning if is_unavailable(error) else log.exception
            note("evaluations_not_read", reason=type(error).__name__)
        await asyncio.sleep(max(EVALUATIONS_S, LOOK_SHARE * (perf_counter() - began)))


def show(curve: list[Evaluation]) -> None:
    """Set the metrics to a curve."""
    for point in curve:
        names = point.policy, str(point.version)
        EVAL_EPISODES.labels(*names).set(point.episodes)
        figures = {"mean": point.mean, "low": point.low, "high": point.high}
        for figure, value in figures.items():
            if value is not None:
                EVAL_REWARD.labels(*names, figure).set(value)


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
        "deleted": remove_deleted_letters(root, connect),
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
