"""Tell PostgreSQL of lapses: times in which a worker lost records and could not say whose.

A worker's lapse is in a file beside its segments (`proxy.spool.outages`). One that has ended is
told once. One that lasts is told as far as it has come, so that no update claims episodes of that
time while the disk stays full; but not at once, because a short one ends with all of its episodes
named. If the worker is gone, nobody loses records in its place, so the lapse ends now.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, time
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.errors import SpoolInUse
from proxy.metrics import LAPSE_SECONDS, LAPSES
from proxy.spool.folders import hold
from proxy.spool.outages import LAPSE, Lapse, LapseFile, note_reported, read_lapse
from store.connection.availability import is_no_records_fault
from store.connection.engine import answers
from store.records import LapseRecord
from store.write.ingest import Ingester

log = structlog.get_logger()

# Interval between two looks at the files.
LOOK_S: Final = 1.0
# A lapse that lasts is told of once it has lasted so long, and again each time it has grown so far.
PATIENCE_S: Final = 30.0
CANNOT_TELL: Final = "a lapse cannot be read, or PostgreSQL does not take it"


class Lapses:
    """Follow the files of lapses under one root."""

    def __init__(self, root: Path, patience_s: float = PATIENCE_S) -> None:
        """Tell of lapses that last after `patience_s` seconds."""
        self._root = root
        self._patience_s = patience_s
        self._ingester = Ingester()
        self._not_before = 0.0
        # The lapse that lasts in each file, and how far it has been told.
        self._reported: dict[Path, tuple[bytes, float]] = {}
        # For how long the longest has lasted (s); 0 if none does.
        self.lasts_s = 0.0
        # Why not all could be told; empty if they could.
        self.trouble = ""

    async def tell(self, engine: AsyncEngine) -> None:
        """Tell of all that there is to tell, unless that was tried within the last second.

        Raises:
            Exception: the database is away (`store.connection.availability.is_no_records_fault`).
        """
        if monotonic() < self._not_before:
            return
        self._not_before = monotonic() + LOOK_S
        for path, lapse in (await self.look()).items():
            if lapse.until is None:
                await self._tell_of_lasting(engine, path, lapse)
            elif await self._store(engine, path, lapse, lapse.until):
                await self._note_reported(path, lapse, lapse.until - lapse.since)

    async def look(self) -> dict[Path, Lapse]:
        """Return the lapses that are to be told, by their files; end those of workers gone."""
        self.trouble = ""
        lapses = {}
        for path in await asyncio.to_thread(lambda: sorted(self._root.glob(f"*/{LAPSE}"))):
            try:
                lapse = await asyncio.to_thread(_untold, path)
            except OSError as error:
                self._fail(path, error)
                continue
            if lapse is not None:
                lapses[path] = lapse
        now = time()
        lasting = [max(now - one.since, 0.0) for one in lapses.values() if one.until is None]
        self.lasts_s = max(lasting, default=0.0)
        LAPSE_SECONDS.set(self.lasts_s)
        return lapses

    async def _note_reported(self, path: Path, lapse: Lapse, lasted_s: float) -> None:
        try:
            await asyncio.to_thread(note_reported, path, lapse)
        except OSError as error:
            # It is stored again, which changes nothing.
            self._fail(path, error)
            return
        LAPSES.inc()
        log.warning("lapse_told", file=str(path), lasted_s=round(lasted_s, 3))

    def _fail(self, path: Path, error: Exception) -> None:
        """Note that a lapse could not be told; records are stored meanwhile, and it is retried."""
        log.error("lapse_not_told", file=str(path), reason=type(error).__name__)
        self.trouble = CANNOT_TELL

    async def _tell_of_lasting(self, engine: AsyncEngine, path: Path, lapse: Lapse) -> None:
        now = time()
        known, reported = self._reported.get(path, (lapse.id, lapse.since))
        since = reported if known == lapse.id else lapse.since
        # A clock that was set back is no reason to wait.
        is_due = not 0 <= now - since < self._patience_s
        if is_due and await self._store(engine, path, lapse, max(now, lapse.since)):
            self._reported[path] = (lapse.id, now)

    async def _store(self, engine: AsyncEngine, path: Path, lapse: Lapse, until: float) -> bool:
        """Store a lapse up to `until`, and return whether that worked.

        Raises:
            Exception: the database is away.
        """
        record = LapseRecord(
            id=UUID(bytes=lapse.id),
            since=datetime.fromtimestamp(lapse.since, UTC),
            until=datetime.fromtimestamp(until, UTC),
        )
        try:
            await self._ingester.store(engine, [record])
        except Exception as error:
            if is_no_records_fault(error) and not await answers(engine):
                raise
            # It may be this lapse that PostgreSQL does not take: no record waits for it.
            self._fail(path, error)
            return False
        return True


def _untold(path: Path) -> Lapse | None:
    """Return what is to be told of a file's lapse, which ends here if its worker is gone.

    Raises:
        OSError: the file cannot be read, or the lapse cannot be ended.
    """
    lapse = read_lapse(path).unreported
    if lapse is None or lapse.until is not None:
        return lapse
    try:
        lock = hold(path.parent / "lock")
    except SpoolInUse:
        return lapse
    try:
        file = LapseFile(path.parent)
        try:
            file.end(time(), named=False)
        finally:
            file.close()
    finally:
        lock.release()
    return read_lapse(path).unreported
