"""Store recording outages: times in which a worker lost records and could not say whose.

A worker notes its outage in a file beside its segments (`proxy.spool.outages`). One that has ended
is stored once. One that lasts is stored as far as it has come, so that no update claims episodes of
that time while the disk stays full; but not at once, because a short one ends with all of its
episodes named. If the worker is gone, nobody loses records in its place, so the outage ends now.
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
from proxy.metrics import RECORDING_OUTAGE_SECONDS
from proxy.spool.folders import hold
from proxy.spool.outages import OUTAGE, OutageFile, RecordingOutage, note_stored, read_outage
from store.database import answers, is_no_records_fault
from store.records import LapseRecord
from store.write.ingest import Ingester

log = structlog.get_logger()

# Interval between two looks at the files.
LOOK_S: Final = 1.0
# An outage that lasts is stored once it has lasted this long, and again when it has grown so far.
PATIENCE_S: Final = 30.0
CANNOT_STORE: Final = "a recording outage cannot be read, or PostgreSQL does not take it"


class RecordingOutages:
    """Follow the files of outages under one root."""

    def __init__(self, root: Path, patience_s: float = PATIENCE_S) -> None:
        """Store outages that last after `patience_s` seconds."""
        self._root = root
        self._patience_s = patience_s
        self._ingester = Ingester()
        self._not_before = 0.0
        # The outage that lasts in each file, and up to which time it is stored.
        self._stored_until: dict[Path, tuple[bytes, float]] = {}
        # For how long the longest has lasted (s); 0 if none does.
        self.lasts_s = 0.0
        # Why not all could be stored; empty if they could.
        self.trouble = ""

    async def store(self, engine: AsyncEngine) -> None:
        """Store all that is not stored yet, unless that was tried within the last second.

        Raises:
            Exception: the database is away (`store.database.is_no_records_fault`).
        """
        if monotonic() < self._not_before:
            return
        self._not_before = monotonic() + LOOK_S
        for path, outage in (await self.look()).items():
            if outage.until is None:
                now = time()
                known, until = self._stored_until.get(path, (outage.id, outage.since))
                since = until if known == outage.id else outage.since
                # A clock that was set back is no reason to wait.
                is_due = not 0 <= now - since < self._patience_s
                if is_due and await self._store(engine, path, outage, max(now, outage.since)):
                    self._stored_until[path] = (outage.id, now)
            elif await self._store(engine, path, outage, outage.until):
                await self._note_stored(path, outage)

    async def look(self) -> dict[Path, RecordingOutage]:
        """Return the outages that are to be stored, by file, after ending those of gone workers."""
        self.trouble = ""
        outages = {}
        for path in await asyncio.to_thread(lambda: sorted(self._root.glob(f"*/{OUTAGE}"))):
            try:
                outage = await asyncio.to_thread(_not_stored, path)
            except OSError as error:
                self._fail(path, error)
                continue
            if outage is not None:
                outages[path] = outage
        now = time()
        lasting = [max(now - one.since, 0.0) for one in outages.values() if one.until is None]
        self.lasts_s = max(lasting, default=0.0)
        RECORDING_OUTAGE_SECONDS.set(self.lasts_s)
        return outages

    async def _store(
        self, engine: AsyncEngine, path: Path, outage: RecordingOutage, until: float
    ) -> bool:
        """Store an outage up to `until`, and return whether that worked.

        Raises:
            Exception: the database is away.
        """
        record = LapseRecord(
            id=UUID(bytes=outage.id),
            since=datetime.fromtimestamp(outage.since, UTC),
            until=datetime.fromtimestamp(until, UTC),
        )
        try:
            await self._ingester.store(engine, [record])
        except Exception as error:
            if is_no_records_fault(error) and not await answers(engine):
                raise
            # It may be this outage that PostgreSQL does not take: no record waits for it.
            self._fail(path, error)
            return False
        return True

    async def _note_stored(self, path: Path, outage: RecordingOutage) -> None:
        try:
            await asyncio.to_thread(note_stored, path, outage)
        except OSError as error:
            # It is stored again, which changes nothing.
            self._fail(path, error)
            return
        lasted_s = (outage.until or outage.since) - outage.since
        log.warning("recording_outage_stored", file=str(path), lasted_s=round(lasted_s, 3))

    def _fail(self, path: Path, error: Exception) -> None:
        log.error("recording_outage_not_stored", file=str(path), reason=type(error).__name__)
        self.trouble = CANNOT_STORE


def _not_stored(path: Path) -> RecordingOutage | None:
    """Return what is to be stored of a file's outage, which ends here if its worker is gone.

    Raises:
        OSError: the file cannot be read, or the outage cannot be ended.
    """
    outage = read_outage(path).not_stored
    if outage is None or outage.until is not None:
        return outage
    try:
        lock = hold(path.parent / "lock")
    except SpoolInUse:
        return outage
    try:
        file = OutageFile(path.parent)
        try:
            file.end(time(), named=False)
        finally:
            file.close()
    finally:
        lock.release()
    return read_outage(path).not_stored
