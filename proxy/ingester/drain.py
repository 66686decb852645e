"""Move records from the spool to PostgreSQL, in batches, off every request's path.

A batch is stored in one transaction and only then counted as drained. Records carry their ids, so
that a record drained twice is stored once. A batch that the database refuses is halved until the
refused record is alone; the record becomes a dead letter, with the reason beside it. While the
database is away, all records wait on disk and are counted.

No record's content stops the drain:

- A record that cannot be read becomes a dead letter at once.
- A record is held if storing it raises an unexpected error. It becomes a dead letter if it fails
  again after another record of its type was stored.
- A record that PostgreSQL does not store, although it answers, is held and tried again.
- A dead letter that cannot be written to disk is held and tried again.

Only the ingester counts records, as it finds them in the workers' folders. Whichever process is
killed at any time, recorded = stored + spooled + dead-lettered + dropped + deleted.

A recording outage is a time in which a worker lost records of unknown episodes. The worker notes it
in a file beside its segments (`proxy.spool.outages`). An outage that has ended is stored once. An
outage that lasts is stored up to now, so that no update claims episodes of that time while the disk
stays full. It is stored only after a while, because gaps name all episodes of a short outage once
it ends. If the worker is gone, it loses no more records, so the outage ends now.
"""

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Final, Literal
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.errors import SpoolInUse
from proxy.ingester.batch_writer import CANNOT_READ, BatchWriter
from proxy.ingester.segment_reader import Segment, files_in_folders, segment_files
from proxy.ingester.transcribe import NO_READERS
from proxy.metrics import (
    DRAIN_LAG,
    DRAIN_STUCK,
    DROPPED,
    RECORDED,
    RECORDING_OUTAGE_SECONDS,
    SPOOLED,
)
from proxy.redaction import Redactor
from proxy.spool.folders import lock_file
from proxy.spool.outages import OUTAGE, OutageFile, RecordingOutage, mark_outage_stored, read_outage
from proxy.spool.segments import MOST_INFLATED, Piece
from proxy.tool_events import ResultReaders
from store.database import is_answering, prevents_all_storing
from store.records import OutageRecord, SpoolRecord
from store.write.ingest import Ingester

log = structlog.get_logger()

# Interval between two looks at the outage files.
OUTAGE_CHECK_S: Final = 1.0
# An outage that lasts is stored whenever it has grown by this much.
OUTAGE_PATIENCE_S: Final = 30.0
CANNOT_STORE_OUTAGE: Final = "a recording outage cannot be read, or PostgreSQL does not take it"


class RecordingOutages:
    """Store the recording outages of all workers under `root` in the database."""

    def __init__(self, root: Path, patience_s: float = OUTAGE_PATIENCE_S) -> None:
        self._root = root
        self._patience_s = patience_s
        self._ingester = Ingester()
        self._not_before = 0.0
        # By file: the id of its lasting outage, and the time up to which the outage is stored.
        self._stored_until: dict[Path, tuple[bytes, float]] = {}
        # For how long the longest outage has lasted (s); 0 if none lasts.
        self.lasts_s = 0.0
        # Why an outage could not be stored; empty if all could be.
        self.trouble = ""

    async def store(self, engine: AsyncEngine) -> None:
        """Store the outages that are not stored yet, unless that was tried within the last second.

        Raises:
            Exception: the database is away (`store.database.prevents_all_storing`).
        """
        if monotonic() < self._not_before:
            return
        self._not_before = monotonic() + OUTAGE_CHECK_S
        for path, outage in (await self.outages_to_store()).items():
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

    async def outages_to_store(self) -> dict[Path, RecordingOutage]:
        """End the outages of gone workers, and return the outages to be stored, by file."""
        self.trouble = ""
        outages = {}
        for path in await asyncio.to_thread(lambda: sorted(files_in_folders(self._root, OUTAGE))):
            try:
                outage = await asyncio.to_thread(_unstored_outage, path)
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
        record = OutageRecord(
            id=UUID(bytes=outage.id),
            since=datetime.fromtimestamp(outage.since, UTC),
            until=datetime.fromtimestamp(until, UTC),
        )
        try:
            await self._ingester.store(engine, [record])
        except Exception as error:
            if prevents_all_storing(error) and not await is_answering(engine):
                raise
            # This outage may be the cause, so records do not wait for it.
            self._fail(path, error)
            return False
        return True

    async def _note_stored(self, path: Path, outage: RecordingOutage) -> None:
        try:
            await asyncio.to_thread(mark_outage_stored, path, outage)
        except OSError as error:
            # The outage is stored again later, which changes nothing.
            self._fail(path, error)
            return
        lasted_s = (outage.until or outage.since) - outage.since
        log.warning("recording_outage_stored", file=str(path), lasted_s=round(lasted_s, 3))

    def _fail(self, path: Path, error: Exception) -> None:
        log.error("recording_outage_not_stored", file=str(path), reason=type(error).__name__)
        self.trouble = CANNOT_STORE_OUTAGE


def _unstored_outage(path: Path) -> RecordingOutage | None:
    """Return a file's outage if the database lacks it, else None; end it if its worker is gone.

    Raises:
        OSError: the file cannot be read, or the outage cannot be ended.
    """
    outage = read_outage(path).unstored
    if outage is None or outage.until is not None:
        return outage
    try:
        lock = lock_file(path.parent / "lock")
    except SpoolInUse:
        return outage
    try:
        file = OutageFile(path.parent)
        try:
            file.mark_records_lost_until(time(), named=False)
        finally:
            file.close()
    finally:
        lock.release()
    return read_outage(path).unstored


State = Literal["moving", "waiting", "stuck"]
MOST_REASON_LENGTH: Final = 200


class DrainState:
    """The drain's present state, since when, and why.

    `moving`: records are being stored, or there are none. `waiting`: PostgreSQL is away, and
    records wait on disk, as intended. `stuck`: something else keeps some or all records from being
    stored. The time of being stuck ends only with `moving`: it includes `waiting` in between.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Begin with the state `moving`; `clock` returns seconds."""
        self._clock = clock
        self._since = clock()
        self._stuck_since: float | None = None
        self.state: State = "moving"
        self.reason = ""
        # Number of held pieces.
        self.held = 0

    def set_state(self, state: State, reason: str = "") -> None:
        """Set the drain's state after a look at the spool; `reason` says why it is that."""
        if state != self.state:
            self._since = self._clock()
        if state == "moving":
            self._stuck_since = None
        elif state == "stuck":
            self._stuck_since = self._since = self._stuck_since or self._since
        self.state, self.reason = state, reason[:MOST_REASON_LENGTH]

    @property
    def stuck_s(self) -> float:
        """Return for how many seconds the drain has been stuck; 0 if it is not."""
        return self._clock() - self._since if self.state == "stuck" else 0.0

    def readyz_fields(self) -> dict[str, object]:
        """Return the drain's state, for how long, why, and the held pieces, for `/readyz`."""
        return {
            "state": self.state,
            "for_s": round(self._clock() - self._since, 1),
            "reason": self.reason,
            "held": self.held,
        }


RETRY_S: Final = 1.0
# Most records that one transaction stores.
BATCH: Final = 256
IDLE_PAUSE_S: Final = 0.1
# Longest wait of `count` for a batch that is being stored.
COUNT_WAIT_S: Final = 1.0
# Pause after a turn that stored all records, so that the next batch is larger: more records then
# share the cost of a transaction, here and in PostgreSQL.
GATHER_PAUSE_S: Final = 0.03


class Drainer:
    """Drain every worker's folder under `root` until `stop` is called."""

    def __init__(
        self,
        root: Path,
        engine_if_connected: Callable[[], AsyncEngine | None],
        *,
        batch: int = BATCH,
        readers: ResultReaders = NO_READERS,
        counted_before: int = 0,
        most_reply: int = MOST_INFLATED,
        redactor: Redactor | None = None,
        send_spans: Callable[[Iterable[SpoolRecord]], None] | None = None,
    ) -> None:
        """Begin with the state `moving`; `root` has a folder for each worker.

        `counted_before` is the number of records on disk that an earlier ingester counted already.
        Replies longer than `most_reply` bytes are not read.
        """
        self._root = root
        self._engine_if_connected = engine_if_connected
        self._batch = batch
        self._writer = BatchWriter(root, readers, most_reply, redactor, send_spans)
        self.outages = RecordingOutages(root)
        self._counted_before = counted_before
        self._segments: dict[str, Segment] = {}
        self._stopping = asyncio.Event()
        # Counting and draining move the same offsets.
        self._busy = asyncio.Lock()
        # Whether the last turn did not store all records that were on disk when it looked.
        self._is_behind = False
        self.progress = DrainState()

    @property
    def waiting_records(self) -> int:
        """Return how many records waited on disk at the last look."""
        return sum(segment.waiting for segment in self._segments.values())

    def stop_after_batch(self) -> None:
        """Make `run` return once the present batch is settled.

        `run` may also be cancelled at any time: unsettled records stay in the spool.
        """
        self._stopping.set()

    async def run(self) -> None:
        """Drain until `stop_after_batch`; while the database is away, try again every second."""
        while not self._stopping.is_set():
            try:
                moved = await self.drain_once()
            except Exception as error:
                # This task must not end: records wait on disk, and are tried again.
                await self._note_failure(error)
                await self._pause(RETRY_S)
            else:
                self._note_progress(moved)
                await self._pause_after(moved)

    async def _pause_after(self, moved: int | None) -> None:
        if moved is None:
            await self._await_connection()
        elif moved == 0:
            await self._pause(IDLE_PAUSE_S)
        elif not (self._is_behind or self._writer.one_by_one):
            await self._pause(GATHER_PAUSE_S)

    async def _await_connection(self) -> None:
        """Pause for `RETRY_S` seconds, or until the first connection has been made."""
        over = monotonic() + RETRY_S
        while (
            self._engine_if_connected() is None
            and monotonic() < over
            and not self._stopping.is_set()
        ):
            await self._pause(IDLE_PAUSE_S)

    async def _note_failure(self, error: Exception) -> None:
        reason = type(error).__name__
        if not prevents_all_storing(error):
            log.exception("drain_failed")
            self.progress.set_state("stuck", reason)
        elif await self._database_keeps_failing(error):
            log.error("drain_stuck", reason=reason)
            self.progress.set_state("stuck", f"PostgreSQL answers but stores no records: {reason}")
        else:
            log.warning("drain_waits", reason=reason)
            self.progress.set_state("waiting", reason)

    async def _database_keeps_failing(self, error: Exception) -> bool:
        """Return whether PostgreSQL answers but keeps failing; this never raises."""
        engine = self._engine_if_connected()
        try:
            return engine is not None and await self._writer.count_error(engine, error)
        except Exception:
            log.exception("drain_failed")
            return True

    def _note_progress(self, moved: int | None) -> None:
        if moved is None:
            self.progress.set_state("waiting", "there is no connection to PostgreSQL yet")
        elif trouble := self._writer.trouble or self.outages.trouble:
            self.progress.set_state("stuck", trouble)
        else:
            self.progress.set_state("moving")

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

    async def count(self) -> None:
        """Count the records that the workers have written up to now, as waiting ones.

        If storing the present batch takes longer than `COUNT_WAIT_S`, they are counted later: a
        scrape of the metrics must not wait for PostgreSQL.
        """
        try:
            async with asyncio.timeout(COUNT_WAIT_S):
                await self._busy.acquire()
        except TimeoutError:
            log.warning("counting_put_off", waited_s=COUNT_WAIT_S)
            # Records that the batch has stored so far do not wait any more.
            self._set_metrics()
            return
        try:
            self._find_segments()
            for segment in self._segments.values():
                if segment.not_before > monotonic():
                    continue
                try:
                    if segment.has_grown():
                        await self._count_rest(segment)
                except OSError as error:
                    self._note_read_error(segment, error)
            self._set_metrics()
        finally:
            self._busy.release()

    async def _count_rest(self, segment: Segment) -> None:
        """Count a segment's uncounted records as waiting, with as many reads as it takes.

        Raises:
            OSError: it cannot be read.
        """
        # A torn frame at the segment's end is not counted here: it may still be being written.
        read = partial(segment.pieces, most=None, sealed=False)
        while pieces := await asyncio.to_thread(read, segment.counted):
            self._count(segment, pieces)

    async def drain_rest(self) -> None:
        """Store all records on disk except held ones; while the database is away, try again."""
        while True:
            try:
                moved = await self.drain_once()
            except Exception as error:
                if not prevents_all_storing(error):
                    raise
                moved = None
                await self.count()
            if moved == 0:
                if not self._writer.is_reading_long_reply:
                    return
                await asyncio.sleep(IDLE_PAUSE_S)
            if moved is None:
                if not self.waiting_records:
                    return
                await asyncio.sleep(RETRY_S)

    async def drain_once(self) -> int | None:
        """Store a batch of each worker's records; return how many records left the spool.

        Without a connection to the database, only count them, and return None.
        """
        engine = self._engine_if_connected()
        if engine is None:
            await self.outages.outages_to_store()
            await self.count()
            return None
        async with self._busy:
            return await self._drain_from(engine)

    async def _drain_from(self, engine: AsyncEngine) -> int:
        self._writer.begin_turn()
        await self.outages.store(engine)
        self._find_segments()
        moved = await self._writer.try_held(engine, self._segments.values())
        self._is_behind = False
        # One batch of each worker: a worker that never pauses must not keep others waiting.
        served: set[Path] = set()
        for segment in list(self._segments.values()):
            if segment.path.parent in served:
                continue
            pieces = await self._next_pieces(segment)
            if not pieces:
                continue
            served.add(segment.path.parent)
            self._is_behind |= segment.has_more
            self._count(segment, pieces)
            entries = self._writer.read(pieces)
            self._is_behind |= len(entries) < len(pieces)
            await self._writer.settle(engine, segment, entries)
            moved += sum(not entry.piece.damage for entry in entries)
        self._set_metrics()
        return moved

    async def _next_pieces(self, segment: Segment) -> list[Piece]:
        """Return the next pieces of a segment; delete it if it has no more and will not grow."""
        if segment.not_before > monotonic():
            self._writer.trouble = CANNOT_READ
            return []
        try:
            if not segment.drained:
                # Look before reading: bytes that a worker adds before it seals are read next time.
                sealed = segment.sealed
                most = 1 if self._writer.one_by_one else self._batch
                pieces = await asyncio.to_thread(
                    segment.pieces, segment.stored, most, sealed=sealed
                )
                if pieces or not sealed:
                    return pieces
            self._delete_drained(segment)
        except OSError as error:
            self._note_read_error(segment, error)
        return []

    def _note_read_error(self, segment: Segment, error: OSError) -> None:
        """Pause a segment that cannot be read or deleted; the others are drained meanwhile."""
        if not segment.is_gone(error):
            segment.pause_after_failure(error)
            self._writer.trouble = CANNOT_READ

    def _find_segments(self) -> None:
        """Add new segments, and count the waiting records of vanished ones as dropped."""
        paths = dict(segment_files(self._root))
        for stem, path in paths.items():
            segment = self._segments.get(stem)
            if segment is None:
                segment = self._segments[stem] = Segment(path)
            segment.path = path
        for stem in self._segments.keys() - paths.keys():
            self._count_dropped(self._segments.pop(stem), "segment_vanished")

    def _count_dropped(self, segment: Segment, why: str) -> None:
        """Count the waiting records of a segment as dropped: they are not on disk any more.

        Somebody deleted the segment, or its worker cut them off after a failed write.
        """
        if segment.waiting:
            DROPPED.inc(segment.waiting)
            log.error(why, segment=segment.path.stem, records=segment.waiting)
            segment.waiting = 0

    def _count(self, segment: Segment, pieces: Iterable[Piece]) -> None:
        """Count those records of the pieces that were not counted before."""
        new = sum(map(segment.count, pieces))
        counted = min(new, self._counted_before)
        self._counted_before -= counted
        RECORDED.inc(new - counted)

    def _set_metrics(self) -> None:
        segments = self._segments.values()
        SPOOLED.set(self.waiting_records)
        DRAIN_LAG.set(sum(max(s.counted.offset - s.stored.offset, 0) for s in segments))
        self.progress.held = sum(len(s.held) for s in segments)
        DRAIN_STUCK.set(self.progress.stuck_s)

    def _delete_drained(self, segment: Segment) -> None:
        """Delete a segment that is drained to its end and will not grow, unless a piece is held.

        Raises:
            OSError: it could not be deleted; it is tried again.
        """
        segment.drained = True
        if segment.held:
            return
        # Records that were counted, and then cut off by their worker after its disk failed.
        self._count_dropped(segment, "records_cut_off")
        segment.remove()
        del self._segments[segment.path.stem]
