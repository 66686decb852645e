"""Moves the spool to PostgreSQL, in batches, off every request's path.

A batch is stored in one transaction and only then counted as drained; records carry their
ids, so that draining one twice stores it once. A batch that the database refuses is cut in
halves until the record it refuses stands alone: that one becomes a dead letter, with the
reason beside it. While the database is away, everything waits on disk, and is counted.

Nothing that is in a record stops the drain. One that cannot be read is a dead letter at once. One
over which storing fails in a way that nobody expected is held: it is passed over, and is a dead
letter as soon as another of its kind was stored and it has failed again. So is one that PostgreSQL
says it cannot take now, while it answers; and a dead letter that the disk does not take yet.

The keeper alone counts records, as it finds them in the workers' folders: whatever is killed
when, recorded = stored + spooled + dead-lettered + dropped.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.capture import MOST_INFLATED
from proxy.keeping.backlog import Segment, segment_files
from proxy.keeping.entries import Entry, raised_at, read_entry
from proxy.keeping.held import TOLD, Held, Why, is_due
from proxy.keeping.letters import Letter, bury, make_private
from proxy.keeping.progress import Progress
from proxy.keeping.tally import count_calls
from proxy.keeping.transcribe import NO_READERS
from proxy.metrics import (
    DEAD_LETTERS,
    DRAIN_LAG,
    DRAIN_STUCK,
    DROPPED,
    HELD,
    RECORDED,
    SPOOLED,
    STORED,
)
from proxy.result_readers import ResultReaders
from proxy.segments import Piece
from store.away import is_away
from store.engine import answers
from store.errors import Refused
from store.ingest import Ingester

log = structlog.get_logger()

RETRY_S: Final = 1.0
IDLE_S: Final = 0.1
# After so many failures one after another, though PostgreSQL answers, records go one by one.
PATIENCE: Final = 5


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
        most_reply: int = MOST_INFLATED,
    ) -> None:
        """`counted_before`: so many of what waits on disk were counted by a killed keeper."""
        self._root = root
        self._connect = connect
        self._batch = batch
        self._readers = readers
        self._most_reply = most_reply
        self._counted_before = counted_before
        self._segments: dict[str, Segment] = {}
        self._ingester = Ingester()
        self._stopping = asyncio.Event()
        # Counting and draining read the same offsets.
        self._busy = asyncio.Lock()
        self.progress = Progress()
        self._turn = 0
        # In which turn a record of each kind was stored last.
        self._stored: dict[type, int] = {}
        self._failures = 0
        # What kept something from being moved in the present turn, though PostgreSQL answers.
        self._trouble = ""
        make_private(root)

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
                self._note_failure(error)
                moved = None
            else:
                self._note(moved)
            pause = RETRY_S if moved is None else IDLE_S if moved == 0 else 0
            if pause:
                await self._pause(pause)

    def _note_failure(self, error: Exception) -> None:
        if is_away(error):
            log.warning("drain_waits", reason=type(error).__name__)
            self._failures += 1
            self.progress.note("waiting", type(error).__name__)
        else:
            log.exception("drain_failed")
            self.progress.note("stuck", type(error).__name__)

    def _note(self, moved: int | None) -> None:
        if moved is None:
            self.progress.note("waiting", "there is no connection to PostgreSQL yet")
        elif self._trouble and not moved:
            self.progress.note("stuck", self._trouble)
        else:
            self.progress.note("moving", self._trouble)

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
                if segment.not_before > monotonic():
                    continue
                try:
                    if segment.grown():
                        # Whether its end is torn, or being written, is told when it is drained.
                        pieces = await asyncio.to_thread(
                            segment.pieces, segment.counted, None, sealed=False
                        )
                        self._count(segment, pieces)
                except OSError as error:
                    self._cannot_read(segment, error)
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
        self._turn += 1
        self._trouble = ""
        self._look()
        moved = await self._try_held(engine)
        for segment in list(self._segments.values()):
            pieces = await self._next(segment)
            if pieces:
                self._count(segment, pieces)
                entries = [read_entry(piece, self._readers, self._most_reply) for piece in pieces]
                await self._settle(engine, segment, entries)
                moved += sum(not piece.damage for piece in pieces)
            if moved:
                break
        self._show()
        return moved

    async def _next(self, segment: Segment) -> list[Piece]:
        """The next pieces of a segment; it is deleted where there are none and will not be any."""
        if segment.not_before > monotonic():
            self._trouble = self._trouble or "a segment cannot be read or deleted"
            return []
        try:
            if not segment.drained:
                # Before it is read: what a worker adds while it is sealed is read next time.
                sealed = segment.sealed
                most = self._batch if self._failures < PATIENCE else 1
                pieces = await asyncio.to_thread(
                    segment.pieces, segment.stored, most, sealed=sealed
                )
                if pieces or not sealed:
                    return pieces
            self._retire(segment)
        except OSError as error:
            # The others go on.
            self._cannot_read(segment, error)
        return []

    def _cannot_read(self, segment: Segment, error: OSError) -> None:
        segment.not_before = monotonic() + RETRY_S
        self._trouble = f"a segment cannot be read or deleted: {error}"
        log.error("segment_failed", segment=segment.path.stem, reason=str(error))

    def _look(self) -> None:
        """Find what the workers wrote."""
        found = dict(segment_files(self._root))
        for stem, path in found.items():
            segment = self._segments.get(stem)
            if segment is None:
                segment = self._segments[stem] = Segment(path)
            segment.path = path
        for stem in self._segments.keys() - found.keys():
            self._drop(self._segments.pop(stem), "segment_vanished")

    def _drop(self, segment: Segment, why: str) -> None:
        """Its records are not there any more: somebody made room, or they were cut off again."""
        if segment.waiting:
            DROPPED.inc(segment.waiting)
            log.error(why, segment=segment.path.stem, records=segment.waiting)
            segment.waiting = 0

    def _count(self, segment: Segment, pieces: Iterable[Piece]) -> None:
        """Count the records in these pieces, those that were not yet."""
        for piece in pieces:
            new = segment.count(piece)
            counted = min(new, self._counted_before)
            self._counted_before -= counted
            RECORDED.inc(new - counted)

    def _show(self) -> None:
        segments = self._segments.values()
        SPOOLED.set(sum(s.waiting for s in segments))
        DRAIN_LAG.set(sum(max(s.counted.offset - s.stored.offset, 0) for s in segments))
        self.progress.held = sum(len(s.held) for s in segments)
        HELD.set(self.progress.held)
        DRAIN_STUCK.set(self.progress.stuck_s)

    def _retire(self, segment: Segment) -> None:
        """Delete a segment that is drained to its end and will not grow.

        Raises:
            OSError: the disk did not; it is tried again.
        """
        segment.drained = True
        if segment.held:
            return
        # What was counted and then cut off again by its worker, whose disk failed.
        self._drop(segment, "records_cut_off")
        segment.remove()
        del self._segments[segment.path.stem]

    async def _settle(
        self, engine: AsyncEngine, segment: Segment, entries: Sequence[Entry]
    ) -> None:
        """Store, halving a batch that fails down to the record that fails.

        What is settled stays so if the database goes away in the middle.
        """
        try:
            await self._store(engine, entries)
        except Exception as error:
            if len(entries) == 1:
                await self._fail(engine, segment, entries[0], error)
            elif is_away(error):
                raise
            else:
                middle = len(entries) // 2
                await self._settle(engine, segment, entries[:middle])
                await self._settle(engine, segment, entries[middle:])
            return
        await self._bury(segment, [entry for entry in entries if entry.record is None])
        settled = (e.piece.records for e in entries if e.piece.start not in segment.held)
        segment.advance(entries[-1].piece, sum(settled))

    async def _store(self, engine: AsyncEngine, entries: Sequence[Entry]) -> None:
        """Store the records among `entries`, and count them; raises what `Ingester.store` does."""
        records = [entry.record for entry in entries if entry.record is not None]
        if records:
            await self._ingester.store(engine, records)
            self._failures = 0
            self._stored |= {type(record): self._turn for record in records}
            STORED.inc(len(records))
            count_calls(records)

    async def _fail(
        self, engine: AsyncEngine, segment: Segment, entry: Entry, error: Exception
    ) -> None:
        """Decide about a record that could not be stored alone.

        Raises:
            Exception: the database is away, and the record is as good as any other.
        """
        if isinstance(error, Refused):
            await self._bury(segment, [entry._replace(reason=str(error))])
            if entry.piece.start not in segment.held:
                segment.advance(entry.piece, entry.piece.records)
        elif not is_away(error):
            # Without its words, which may quote the record.
            log.error("record_held", error=type(error).__name__, raised_at=raised_at(error))
            self._hold(segment, entry, "suspect", _reason(error))
        else:
            if self._failures >= PATIENCE and await answers(engine):
                log.error("record_held", error=type(error).__name__)
                self._hold(segment, entry, "unanswered", _reason(error))
            raise error

    def _hold(self, segment: Segment, entry: Entry, why: Why, reason: str) -> None:
        kind = None if entry.record is None else type(entry.record)
        # Its bytes stay on disk: nobody knows how many such records there will be.
        piece = entry.piece._replace(data=b"")
        segment.hold(Held(piece, why, reason, kind, self._turn, monotonic()))

    async def _bury(self, segment: Segment, entries: Sequence[Entry]) -> bool:
        """Make dead letters of these; where the disk does not take them, they are held."""
        if not entries:
            return True
        # A name that no other record ever has; the same one if a kill makes us do this again.
        letters = [
            Letter(f"{segment.path.stem}-{entry.piece.end}", entry.piece.data, entry.reason)
            for entry in entries
        ]
        try:
            await asyncio.to_thread(bury, self._root, letters)
        except OSError as error:
            log.error("dead_letters_wait", letters=len(letters), reason=str(error))
            for entry in entries:
                self._hold(segment, entry._replace(record=None), "letter", entry.reason)
            return False
        DEAD_LETTERS.inc(sum(entry.piece.records for entry in entries))
        for letter in letters:
            # Its first line: what follows may quote the record.
            log.error(
                "dead_letter", reason=letter.reason.partition("\n")[0][:300], letter=letter.name
            )
        return True

    async def _try_held(self, engine: AsyncEngine) -> int:
        """Try what was passed over again, as far as it is due; returns how many were settled."""
        moved = 0
        for segment in self._segments.values():
            for held in sorted(segment.held.values()):
                if is_due(held, self._stored, monotonic()):
                    moved += await self._try_again(engine, segment, held)
                if held.piece.start in segment.held:
                    self._trouble = TOLD[held.why]
        return moved

    async def _try_again(self, engine: AsyncEngine, segment: Segment, held: Held) -> bool:
        """Store a record that was passed over, or make it a dead letter.

        Raises:
            Exception: the database is away.
        """
        begin, end = held.piece.begin, held.piece.end
        try:
            data = await asyncio.to_thread(segment.read, begin, end)
        except OSError as error:
            self._cannot_read(segment, error)
            return False
        piece = held.piece._replace(data=data)
        entry = Entry(piece, None, held.reason)
        if held.why != "letter":
            entry = read_entry(piece, self._readers, self._most_reply)
            try:
                await self._store(engine, [entry])
            except Exception as error:
                if is_away(error):
                    if held.why == "suspect" or not await answers(engine):
                        raise
                    self._hold(segment, entry, held.why, held.reason)
                    return False
                entry = Entry(piece, None, _reason(error))
        if entry.record is None and not await self._bury(segment, [entry]):
            return False
        segment.release(held)
        return True


def _reason(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error)
    return f"{type(error).__name__} at {raised_at(error)}: {error}"
