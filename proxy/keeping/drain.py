"""Moves the spool to PostgreSQL, in batches, off every request's path.

A batch is stored in one transaction and only then counted as drained; records carry their
ids, so that draining one twice stores it once. A batch that the database refuses is cut in
halves until the record it refuses stands alone: that one becomes a dead letter, with the
reason beside it. While the database is away, everything waits on disk, and is counted.

The keeper alone counts records, as it finds them in the workers' folders: whatever is killed
when, recorded = stored + spooled + dead-lettered + dropped.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.capture import Captured, Gap
from proxy.keeping.backlog import Segment, segment_files
from proxy.keeping.transcribe import NO_READERS, transcribe
from proxy.metrics import (
    DEAD_LETTERS,
    DRAIN_LAG,
    DROPPED,
    KEY_CONFLICTS,
    NOT_TRAINABLE,
    RECORDED,
    SPOOLED,
    STORED,
    TOKENS,
    TOOL_STATUS,
    labelled,
)
from proxy.result_readers import ResultReaders
from proxy.segments import decode_payload, read_frames
from store.away import is_away
from store.errors import Refused
from store.ingest import Ingester
from store.records import CallRecord, GapRecord, SpoolRecord

log = structlog.get_logger()

RETRY_S: Final = 1.0
IDLE_S: Final = 0.1


class Entry(NamedTuple):
    """A frame, where it ends in its segment, and its record, or why there is none."""

    end: int
    payload: bytes
    record: SpoolRecord | None
    reason: str


class Drainer:
    """Drains every worker's folder under `root` until told to stop."""

    def __init__(
        self,
        root: Path,
        connect: Callable[[], AsyncEngine | None],
        *,
        batch: int,
        readers: ResultReaders = NO_READERS,
        counted_before: int = 0,
    ) -> None:
        """`counted_before`: so many of what waits on disk were counted by a killed keeper."""
        self._root = root
        self._connect = connect
        self._batch = batch
        self._readers = readers
        self._counted_before = counted_before
        self._segments: dict[str, Segment] = {}
        self._ingester = Ingester(_tell_of_conflicts)
        self._stopping = asyncio.Event()
        # Counting and draining read the same offsets.
        self._busy = asyncio.Lock()

    def stop(self) -> None:
        """Return from `run` once the present batch is through."""
        self._stopping.set()

    async def run(self) -> None:
        """Drain for ever; a database that is away is asked again every second."""
        while not self._stopping.is_set():
            try:
                moved = await self.drain_once()
            except Exception as error:
                # Whatever it is, what is on disk waits, and this task must go on asking.
                if is_away(error):
                    log.warning("drain_waits", reason=type(error).__name__)
                else:
                    log.exception("drain_failed")
                moved = None
            pause = RETRY_S if moved is None else IDLE_S if moved == 0 else 0
            if pause:
                await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

    async def count(self) -> None:
        """Count what the workers have written by now."""
        async with self._busy:
            self._look()
            for segment in self._segments.values():
                if segment.grown():
                    begin = segment.counted
                    data = await asyncio.to_thread(segment.read, begin)
                    self._count(segment, (begin + end for end, _ in read_frames(data)))
            self._show()

    async def drain_once(self) -> int | None:
        """Store one batch; returns how many left the spool, None if there is no database."""
        engine = self._connect()
        if engine is None:
            await self.count()
            return None
        async with self._busy:
            return await self._drain_from(engine)

    async def _drain_from(self, engine: AsyncEngine) -> int:
        self._look()
        for segment in list(self._segments.values()):
            # Before it is read: what a worker adds while it is sealed is read next time.
            sealed = segment.sealed
            begin = segment.stored
            data = await asyncio.to_thread(segment.read, begin)
            frames = list(islice(read_frames(data), self._batch))
            if frames:
                self._count(segment, (begin + end for end, _ in frames))
                entries = [_entry(begin + end, payload, self._readers) for end, payload in frames]
                await self._settle(engine, segment, entries)
                return len(frames)
            if sealed:
                self._retire(segment, data)
        self._show()
        return 0

    def _look(self) -> None:
        """Find what the workers wrote."""
        found = dict(segment_files(self._root))
        for stem, path in found.items():
            segment = self._segments.setdefault(stem, Segment(path))
            segment.path = path
        for stem in self._segments.keys() - found.keys():
            # Not our doing: somebody made room.
            lost = self._segments.pop(stem).waiting
            DROPPED.inc(lost)
            log.error("segment_vanished", segment=stem, records=lost)

    def _count(self, segment: Segment, ends: Iterable[int]) -> None:
        """Count the frames that end there, those that were not yet."""
        for end in ends:
            if end > segment.counted:
                segment.counted = end
                self._count_one(segment)

    def _count_one(self, segment: Segment) -> None:
        segment.waiting += 1
        if self._counted_before:
            self._counted_before -= 1
        else:
            RECORDED.inc()

    def _show(self) -> None:
        SPOOLED.set(sum(s.waiting for s in self._segments.values()))
        DRAIN_LAG.set(sum(s.counted - s.stored for s in self._segments.values()))

    def _retire(self, segment: Segment, rest: bytes) -> None:
        """Delete a segment that is drained to its end and will not grow."""
        if rest:
            # A crash left it half-written; it was never acknowledged. It is kept, not stored.
            self._count_one(segment)
            reason = f"a torn frame of {len(rest)} bytes at {segment.stored}"
            self._dead_letter(segment, segment.stored + len(rest), rest, reason)
        del self._segments[segment.path.stem]
        segment.remove()

    async def _settle(self, engine: AsyncEngine, segment: Segment, entries: list[Entry]) -> None:
        """Store, halving a refused batch down to the record that is refused.

        What is settled stays so if the database goes away in the middle.
        """
        records = [entry.record for entry in entries if entry.record is not None]
        try:
            if records:
                await self._ingester.store(engine, records)
        except Refused as error:
            if len(entries) == 1:
                self._dead_letter(segment, entries[0].end, entries[0].payload, str(error))
                return
            middle = len(entries) // 2
            await self._settle(engine, segment, entries[:middle])
            await self._settle(engine, segment, entries[middle:])
            return
        STORED.inc(len(records))
        for entry in entries:
            if entry.record is None:
                self._dead_letter(segment, entry.end, entry.payload, entry.reason)
        segment.advance(entries[-1].end, len(records))
        for record in records:
            if isinstance(record, CallRecord):
                _count_call(record)

    def _dead_letter(self, segment: Segment, end: int, payload: bytes, reason: str) -> None:
        folder = self._root / "dead"
        folder.mkdir(exist_ok=True)
        # A name that no other record ever has; the same one if a kill makes us do this again.
        name = f"{segment.path.stem}-{end}"
        (folder / f"{name}.reason").write_text(reason)
        (folder / f"{name}.letter").write_bytes(payload)
        DEAD_LETTERS.inc()
        segment.advance(end, 1)
        log.error("dead_letter", reason=reason[:300], letter=name)


def _entry(end: int, payload: bytes, readers: ResultReaders) -> Entry:
    try:
        return Entry(end, payload, record_of(payload, readers), "")
    except (msgspec.DecodeError, UnicodeDecodeError, zlib.error, KeyError) as error:
        return Entry(end, payload, None, f"cannot be read: {error}")


def record_of(payload: bytes, readers: ResultReaders = NO_READERS) -> SpoolRecord:
    """The ledger's record in a spooled payload.

    Raises:
        msgspec.DecodeError, zlib.error, KeyError: there is none that this Pawl can read.
    """
    frame = decode_payload(payload)
    if isinstance(frame, Captured):
        return transcribe(frame, readers)
    if isinstance(frame, Gap):
        return GapRecord(id=UUID(bytes=frame.id), episodes=frame.episodes)
    return frame


def _tell_of_conflicts(requests: list[UUID]) -> None:
    KEY_CONFLICTS.inc(len(requests))
    log.warning("idempotency_key_reused", stored=[str(request) for request in requests[:10]])


def _count_call(record: CallRecord) -> None:
    policy = record.policy or ""
    labelled(TOKENS, policy, "prompt").inc(len(record.tokens.prompt_ids) // 4)
    labelled(TOKENS, policy, "sampled").inc(len(record.tokens.sampled_ids) // 4)
    if record.reason is not None:
        labelled(NOT_TRAINABLE, record.reason).inc()
    for event in record.tool_events:
        labelled(TOOL_STATUS, event.status).inc()
