"""Run the process beside the workers: drain their spool, migrate the database, serve metrics.

Serving does not need it: while the ingester is away, records wait on disk.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.errors import SpoolInUse
from proxy.feedback import KeyFiles
from proxy.ingester.admin import OwnersFile, admin_app, count_unsettled
from proxy.ingester.database import Database
from proxy.ingester.drain import Drainer
from proxy.ingester.removing import DeadLetterCleaner, remove_outdated, remove_pending
from proxy.keys import KeyChecker, KeyFile
from proxy.metrics import EVAL_EPISODES, EVAL_REWARD, INITIAL_LABELS
from proxy.redaction import Redactor, open_redactor
from proxy.settings import ProxySettings
from proxy.shared_memory import ProcessState
from proxy.spool.folders import PRIVATE_MODE, Lock, lock_file
from store.admin_port import serve_app
from store.database import is_unavailable, prevents_all_storing
from store.metrics import begin_at_zero, show_version
from store.read.evaluations import rewards_by_version

log = structlog.get_logger()

LOCK_RETRY_S: Final = 0.1
# Seconds between two runs of a repeated task.
CLEAN_KEYS_EVERY_S: Final = 600.0
SHOW_EVALUATIONS_EVERY_S: Final = 2.0
REMOVE_DELETED_EVERY_S: Final = 10.0
REMOVE_OUTDATED_EVERY_S: Final = 600.0
# Seconds from the start to the first removal of outdated records.
FIRST_REMOVE_OUTDATED_S: Final = 10.0
# A pause is at least this many times as long as the work before it, so that slow work (very many
# episodes of evaluation) does not keep the database busy.
LEAST_PAUSE_RATIO: Final = 20


@asynccontextmanager
async def run_ingester(
    settings: ProxySettings,
    *,
    patience_s: float = 0.0,
    processes: Callable[[], list[ProcessState]] | None = None,
) -> AsyncIterator[None]:
    """Run an ingester while the context is entered; at its end, drain for a limited time.

    Wait `patience_s` seconds for another ingester to release the spool directory. `processes`
    returns the workers' states; it is None if no supervisor runs them.

    Raises:
        SpoolInUse: another ingester holds the spool directory.
        NotListening: the admin port is taken.
        BadRedaction: the rules of redaction cannot be used.
    """
    redactor = open_redactor(settings)
    # Records hold prompts, so a new folder is private. An existing one keeps its owner's choice.
    settings.spool_dir.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
    lock = await _wait_for_lock(settings.spool_dir / "lock", patience_s)
    try:
        async with _run_with_lock(settings, redactor, processes):
            yield
    finally:
        lock.release()
        log.info("ingester_down")


async def _wait_for_lock(path: Path, patience_s: float) -> Lock:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            return lock_file(path)
        except SpoolInUse:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(LOCK_RETRY_S)


@asynccontextmanager
async def _run_with_lock(
    settings: ProxySettings,
    redactor: Redactor | None,
    processes: Callable[[], list[ProcessState]] | None,
) -> AsyncIterator[None]:
    """Run an ingester in a spool directory whose lock this process holds."""
    database = Database(settings)
    spans = None
    if settings.otel:
        # Imported here: the packages are an extra, and the supervisor has checked for them.
        from proxy.ingester.spans import Spans

        spans = Spans()
    drainer = Drainer(
        settings.spool_dir,
        database.engine_if_connected,
        readers=settings.tool_results,
        counted_before=count_unsettled(),
        most_reply=settings.max_reply_mb * 2**20,
        redactor=redactor,
        send_spans=None if spans is None else spans.send,
    )
    key_checker = KeyChecker(settings.access, hosts=settings.allowed_hosts)
    key_file = KeyFile(settings.spool_dir)
    key_checker.replace_keys(key_file.read())
    owners = OwnersFile(settings.policies)
    app = admin_app(database, drainer, key_checker, owners, processes)
    show_version()
    begin_at_zero(INITIAL_LABELS)
    admin = await serve_app(app, settings.admin_listen, "PAWL_ADMIN_LISTEN", None)
    keys = asyncio.create_task(key_file.watch(key_checker.replace_keys), name="pawl-keys")
    watching = asyncio.create_task(database.run(), name="pawl-database")
    draining = asyncio.create_task(drainer.run(), name="pawl-drain")
    side_tasks = _start_side_tasks(settings, database)
    log.info("ingester_up", admin=settings.admin_listen)
    try:
        yield
    finally:
        for task in side_tasks:
            task.cancel()
        await _drain_rest(drainer, draining, settings.last_drain_s)
        if spans is not None:
            await spans.close(settings.spans_end_s)
        await asyncio.wait(side_tasks)
        database.stop_watching()
        await asyncio.wait([watching])
        await database.close()
        await admin.cleanup()
        keys.cancel()
        await asyncio.wait([keys])


def _start_side_tasks(settings: ProxySettings, database: Database) -> list[asyncio.Task[None]]:
    """Start the ingester's periodic tasks; each runs until it is cancelled."""
    root, days = settings.spool_dir, settings.keep_days
    engine_if_connected = database.engine_if_connected
    files, deleted = KeyFiles(root), DeadLetterCleaner(root)
    work = {
        "clean-keys": repeat(partial(clean_keys, files), engine_if_connected, CLEAN_KEYS_EVERY_S),
        "evaluations": repeat(show_evaluations, engine_if_connected, SHOW_EVALUATIONS_EVERY_S, 0.0),
        "deleted": repeat(deleted.remove, engine_if_connected, REMOVE_DELETED_EVERY_S),
        "pending": repeat(
            partial(remove_pending, settings.keep_pending_days),
            *(engine_if_connected, REMOVE_OUTDATED_EVERY_S, FIRST_REMOVE_OUTDATED_S),
        ),
    }
    if days is not None:
        remove = partial(remove_outdated, root, days)
        work["outdated"] = repeat(
            remove, engine_if_connected, REMOVE_OUTDATED_EVERY_S, FIRST_REMOVE_OUTDATED_S
        )
    return [asyncio.create_task(task, name=f"pawl-{name}") for name, task in work.items()]


async def repeat(
    work: Callable[[AsyncEngine | None], Awaitable[None]],
    engine_if_connected: Callable[[], AsyncEngine | None],
    pause_s: float,
    first_s: float | None = None,
) -> None:
    """Repeat work until cancelled; a failure is logged, and the work is tried again.

    `work` gets the engine, or None before the first connection. `first_s` is the pause before the
    first run (None: `pause_s`). Later pauses take `pause_s`, or
    `LEAST_PAUSE_RATIO` times as long as the work before, if that is longer.
    """
    task = asyncio.current_task()
    name = "" if task is None else task.get_name()
    await asyncio.sleep(pause_s if first_s is None else first_s)
    while True:
        began = perf_counter()
        try:
            await work(engine_if_connected())
        except Exception as error:
            # This task must not end.
            write_log = log.warning if is_unavailable(error) else log.exception
            write_log("work_put_off", task=name, reason=type(error).__name__)
        await asyncio.sleep(max(pause_s, LEAST_PAUSE_RATIO * (perf_counter() - began)))


async def clean_keys(files: KeyFiles, _: AsyncEngine | None) -> None:
    """Delete this machine's idempotency keys that are older than a day, or too many."""
    log.info("idempotency_keys_forgotten", keys=await asyncio.to_thread(files.delete_old))


async def show_evaluations(engine: AsyncEngine | None) -> None:
    """Set the metrics of each policy version's evaluation: episodes, mean reward and interval."""
    if engine is None:
        return
    async with engine.connect() as connection:
        curve = await rewards_by_version(connection)
    for point in curve:
        names = point.policy, str(point.version)
        EVAL_EPISODES.labels(*names).set(point.episodes)
        for figure in ("mean", "low", "high"):
            value = getattr(point, figure)
            if value is not None:
                EVAL_REWARD.labels(*names, figure).set(value)


async def _drain_rest(drainer: Drainer, draining: asyncio.Task[None], within_s: float) -> None:
    """Drain for at most `within_s` seconds; the next ingester stores the remaining records."""
    drainer.stop_after_batch()
    try:
        async with asyncio.timeout(within_s):
            await draining
            await drainer.drain_rest()
    except Exception as error:
        # The rest of the ingester must still shut down in order.
        if not prevents_all_storing(error):
            log.exception("drain_failed")
    if drainer.waiting_records:
        log.warning("spool_left", records=drainer.waiting_records)
