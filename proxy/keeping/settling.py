"""Settles records, each in one of three ways: stored, a dead letter, or held for later.

Whatever is raised over a record, those after it are settled as well (`proxy.keeping.held`).
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.keeping.backlog import Segment
from proxy.keeping.entries import Entry, raised_at, read_entry
from proxy.keeping.held import TOLD, Held, Why, is_due
from proxy.keeping.letters import Letter, bury
from proxy.keeping.tally import count_calls, count_conflicts
from proxy.metrics import DEAD_LETTERS, STORED
from proxy.result_readers import ResultReaders
from proxy.segments import Piece
from store.away import is_away
from store.engine import answers
from store.errors import Refused
from store.ingest import Ingester

log = structlog.get_logger()

# After so many failures one after another, though PostgreSQL answers, records go one by one.
PATIENCE: Final = 5
CANNOT_READ: Final = "a segment cannot be read or deleted"


class Settler:
    """Settles the records of one drainer; the caller sees to it that it does so once at a time."""

    def __init__(self, root: Path, readers: ResultReaders, most_reply: int) -> None:
        self._root = root
        self._readers = readers
        self._most_reply = most_reply
        self._ingester = Ingester(count_conflicts)
        self._turn = 0
        # In which turn a record of each kind was stored last.
        self._stored: dict[type, int] = {}
        # How often PostgreSQL failed since anything was stored.
        self.failures = 0
        # What kept something from being settled in the present turn, though PostgreSQL answers.
        self.trouble = ""

    @property
    def one_by_one(self) -> bool:
        """Whether to settle one record at a time: PostgreSQL fails, and it may be over one."""
        return self.failures >= PATIENCE

    def begin(self) -> None:
        """Begin another turn."""
        self._turn += 1
        self.trouble = ""

    def read(self, pieces: Iterable[Piece]) -> list[Entry]:
        """Return what the pieces of a segment say."""
        return [read_entry(piece, self._readers, self._most_reply) for piece in pieces]

    async def settle(self, engine: AsyncEngine, segment: Segment, entries: Sequence[Entry]) -> None:
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
                await self.settle(engine, segment, entries[:middle])
                await self.settle(engine, segment, entries[middle:])
            return
        await self._bury(segment, [entry for entry in entries if entry.record is None])
        settled = (e.piece.records for e in entries if e.piece.start not in segment.held)
        segment.advance(entries[-1].piece, sum(settled))

    async def _store(self, engine: AsyncEngine, entries: Sequence[Entry]) -> None:
        """Store the records among `entries`, and count them; raises what `Ingester.store` does."""
        records = [entry.record for entry in entries if entry.record is not None]
        if records:
            await self._ingester.store(engine, records)
            self.failures = 0
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
            if self.failures >= PATIENCE and await answers(engine):
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

    async def try_held(self, engine: AsyncEngine, segments: Iterable[Segment]) -> int:
        """Try what was passed over again, as far as it is due; returns how many were settled."""
        moved = 0
        for segment in segments:
            for held in sorted(segment.held.values()):
                if is_due(held, self._stored, monotonic()):
                    moved += await self._try_again(engine, segment, held)
                if held.piece.start in segment.held:
                    self.trouble = TOLD[held.why]
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
            segment.failed(error)
            self.trouble = CANNOT_READ
            return False
        piece = held.piece._replace(data=data)
        entry = Entry(piece, None, held.reason)
        if held.why != "letter":
            [entry] = self.read([piece])
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
