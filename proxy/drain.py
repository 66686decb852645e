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
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.capture import Captured, Gap
from proxy.metrics import (
    DEAD_LETTERS,
    DRAIN_LAG,
    NOT_TRAINABLE,
    RECORDED,
    SPOOLED,
    STORED,
    TOKENS,
    TOOL_STATUS,
    labelled,
)
from proxy.segments import decode_payload, read_frames
from proxy.spool import OPEN, SEALED, is_held
from proxy.transcribe import transcribe
from store.away import is_away
from store.errors import Refused
from store.ids import new_id
from store.ingest import Ingester
from store.records import CallRecord, GapRecord, SpoolRecord

log = structlog.get_logger()

RETRY_S: Final = 1.0
IDLE_S: Final = 0.1
# So much of a segment is read at once.
READ_BYTES: Final = 4 * 2**20


class Segment:
    """A segment on its way into the database."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counted = 0
        self.stored = 0

    @property
    def sealed(self) -> bool:
        """Whether it will not grow: it was sealed, or who wrote it is gone."""
        return self.path.suffix == SEALED or not is_held(self.path.parent / "lock")


class Drainer:
    """Drains every worker's folder under `root` until told to stop."""

    def __init__(
        self, root: Path, connect: Callable[[], AsyncEngine | None], *, batch: int
    ) -> None:
        self._root = root
        self._connect = connect
        self._batch = batch
        self._segments: dict[str, Segment] = {}
        self._spooled = 0
        self._ingester = Ingester()
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
            for segment in list(self._segments.values()):
                if segment.path.stat().st_size > segment.counted:
                    self._count(segment, await asyncio.to_thread(_read, segment, segment.counted))
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
            data = await asyncio.to_thread(_read, segment, segment.stored)
            self._count(segment, data[segment.counted - segment.stored :])
            frames = list(islice(read_frames(data), self._batch))
            if frames:
                await self._store(engine, [payload for _, payload in frames])
                segment.stored += frames[-1][0]
                return len(frames)
            if sealed:
                self._retire(segment, data)
        self._show()
        return 0

    def _look(self) -> None:
        """Find what the workers wrote: `ID.open` while it grows, `ID.seg` when it is sealed."""
        found = {path.stem: path for path in self._root.glob(f"*/*{OPEN}")}
        found |= {path.stem: path for path in self._root.glob(f"*/*{SEALED}")}
        for stem in sorted(found):
            segment = self._segments.setdefault(stem, Segment(found[stem]))
            segment.path = found[stem]

    def _count(self, segment: Segment, data: bytes) -> None:
        """Count the frames of `data`, which begins where counting ended."""
        begin = segment.counted
        for end, _ in read_frames(data):
            segment.counted = begin + end
            self._spooled += 1
            RECORDED.inc()

    def _show(self) -> None:
        SPOOLED.set(self._spooled)
        DRAIN_LAG.set(sum(s.counted - s.stored for s in self._segments.values()))

    def _retire(self, segment: Segment, rest: bytes) -> None:
        """Delete a segment that is drained to its end and will not grow."""
        if rest:
            # A crash left it half-written; it was never acknowledged. It is kept, not stored.
            RECORDED.inc()
            self._spooled += 1
            self._dead_letter(rest, f"a torn frame of {len(rest)} bytes at {segment.stored}")
        segment.path.unlink()
        del self._segments[segment.path.stem]

    async def _store(self, engine: AsyncEngine, payloads: list[bytes]) -> None:
        """Store, halving a refused batch down to the record that is refused."""
        records: list[SpoolRecord] = []
        sound: list[bytes] = []
        for payload in payloads:
            try:
                records.append(record_of(payload))
                sound.append(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, zlib.error, KeyError) as error:
                self._dead_letter(payload, f"cannot be read: {error}")
        await self._store_records(engine, records, sound)

    async def _store_records(
        self, engine: AsyncEngine, records: list[SpoolRecord], payloads: list[bytes]
    ) -> None:
        if not records:
            return
        try:
            await self._ingester.store(engine, records)
        except Refused as error:
            if len(records) == 1:
                self._dead_letter(payloads[0], str(error))
                return
            middle = len(records) // 2
            await self._store_records(engine, records[:middle], payloads[:middle])
            await self._store_records(engine, records[middle:], payloads[middle:])
            return
        STORED.inc(len(records))
        self._spooled -= len(records)
        for record in records:
            if isinstance(record, CallRecord):
                _count_call(record)

    def _dead_letter(self, payload: bytes, reason: str) -> None:
        folder = self._root / "dead"
        folder.mkdir(exist_ok=True)
        # A name that is never used again, whatever was replayed and removed meanwhile.
        name = str(new_id())
        (folder / f"{name}.reason").write_text(reason)
        (folder / f"{name}.letter").write_bytes(payload)
        DEAD_LETTERS.inc()
        self._spooled -= 1
        log.error("dead_letter", reason=reason[:300], letter=name)


def record_of(payload: bytes) -> SpoolRecord:
    """The ledger's record in a spooled payload.

    Raises:
        msgspec.DecodeError, zlib.error, KeyError: there is none that this Pawl can read.
    """
    frame = decode_payload(payload)
    if isinstance(frame, Captured):
        return transcribe(frame)
    if isinstance(frame, Gap):
        return GapRecord(id=new_id(), episodes=frame.episodes)
    return frame


def _read(segment: Segment, offset: int) -> bytes:
    """What is on disk from `offset` on, up to a limit that holds a whole frame."""
    with segment.path.open("rb") as file:
        file.seek(offset)
        data = file.read(READ_BYTES)
        while len(data) >= READ_BYTES and next(read_frames(data), None) is None:
            more = file.read(len(data))
            if not more:
                break
            data += more
        return data


def _count_call(record: CallRecord) -> None:
    policy = record.policy or ""
    labelled(TOKENS, policy, "prompt").inc(len(record.tokens.prompt_ids) // 4)
    labelled(TOKENS, policy, "sampled").inc(len(record.tokens.sampled_ids) // 4)
    if record.reason is not None:
        labelled(NOT_TRAINABLE, record.reason).inc()
    for event in record.tool_events:
        labelled(TOOL_STATUS, event.status).inc()
