"""Moves the spool to PostgreSQL, in batches, off every request's path.

A batch is stored in one transaction and only then counted as drained; records carry their
ids, so that draining one twice stores it once. A batch that the database refuses is cut in
halves until the record it refuses stands alone: that one becomes a dead letter, with the
reason beside it. While the database is away, everything waits on disk.
"""

import asyncio
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.metrics import DEAD_LETTERS, DRAIN_LAG, RECORDED, SPOOLED, STORED
from proxy.segments import decode_payload, read_frames
from proxy.spool import Spool
from store.away import is_away
from store.errors import Refused
from store.ids import new_id
from store.ingest import Ingester
from store.records import SpoolRecord

log = structlog.get_logger()

RETRY_S: Final = 1.0
IDLE_S: Final = 0.2
# Records of a proxy that was killed come back at its next start; an almost empty segment
# that is drained is closed after this long, so that they are few.
QUIET_S: Final = 5.0


class Drainer:
    """Drains one spool until told to stop."""

    def __init__(
        self,
        spool: Spool,
        connect: Callable[[], AsyncEngine | None],
        *,
        batch: int,
    ) -> None:
        self._spool = spool
        self._connect = connect
        self._batch = batch
        self._ingester = Ingester()
        self._offsets: dict[Path, int] = {}
        self._last_write = 0.0
        self._stopping = asyncio.Event()

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

    async def drain_once(self) -> int | None:
        """Store one batch; returns how many left the spool, None if there is no database."""
        engine = self._connect()
        if engine is None:
            return None
        for segment in self._spool.segments():
            offset = self._offsets.get(segment, 0)
            batch, end = await asyncio.to_thread(self._read, segment, offset)
            if batch:
                await self._store(engine, batch)
                self._offsets[segment] = end
                self._last_write = asyncio.get_running_loop().time()
                return len(batch)
            self._retire(segment)
        DRAIN_LAG.set(0)
        return 0

    def _read(self, segment: Path, offset: int) -> tuple[list[bytes], int]:
        """Up to one batch of payloads from `offset` on, and where the last of them ends."""
        size = self._spool.durable_size(segment)
        with segment.open("rb") as file:
            file.seek(offset)
            data = file.read(size - offset)
        frames = list(islice(read_frames(data), self._batch))
        end = offset + (frames[-1][0] if frames else 0)
        DRAIN_LAG.set(size - end)
        return [payload for _, payload in frames], end

    def count_waiting(self) -> int:
        """How many records the spool holds, those of earlier processes included."""
        return sum(
            sum(1 for _ in read_frames(segment.read_bytes())) for segment in self._spool.segments()
        )

    def _retire(self, segment: Path) -> None:
        """Delete a segment that is drained to its end and no longer written."""
        offset = self._offsets.get(segment, 0)
        size = self._spool.durable_size(segment)
        is_active = segment == self._spool.active
        if is_active:
            quiet = asyncio.get_running_loop().time() - self._last_write > QUIET_S
            if not (quiet and offset == size > 0):
                return
            self._spool.close_segment(segment)
            if segment.stat().st_size > offset:
                return
        if offset < size:
            self._keep_torn_tail(segment, offset)
        segment.unlink()
        self._offsets.pop(segment, None)

    def _keep_torn_tail(self, segment: Path, offset: int) -> None:
        """What a crash left half-written was never acknowledged; it is kept, not stored."""
        tail = segment.read_bytes()[offset:]
        RECORDED.inc()
        SPOOLED.inc()
        self._dead_letter(tail, f"a torn frame of {len(tail)} bytes at {offset}")

    async def _store(self, engine: AsyncEngine, payloads: list[bytes]) -> None:
        """Store, halving a refused batch down to the record that is refused."""
        records: list[SpoolRecord] = []
        sound: list[bytes] = []
        for payload in payloads:
            try:
                records.append(decode_payload(payload))
                sound.append(payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
        SPOOLED.dec(len(records))

    def _dead_letter(self, payload: bytes, reason: str) -> None:
        folder = self._spool.folder / "dead"
        folder.mkdir(exist_ok=True)
        # A name that is never used again, whatever was replayed and removed meanwhile.
        name = str(new_id())
        (folder / f"{name}.reason").write_text(reason)
        (folder / f"{name}.letter").write_bytes(payload)
        DEAD_LETTERS.inc()
        SPOOLED.dec()
        log.error("dead_letter", reason=reason[:300], letter=name)
