"""Settle records: store and count them, or write them as dead letters; hold those that must wait.

An error over one record does not hold up later records: the record is held, and its segment is kept
until it is settled.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.ingester.removing import DeadLetter, write_dead_letters
from proxy.ingester.segment_reader import HeldPiece, HoldReason, Segment
from proxy.ingester.transcribe import TAKES_LONG, Entry, question_digest, raised_at, read_entry
from proxy.metrics import (
    DEAD_LETTERS,
    DELETED,
    KEY_CONFLICTS,
    LATE,
    NOT_TRAINABLE,
    STORED,
    TOKENS,
    TOOL_STATUS,
    labelled,
)
from proxy.redaction import Redactor
from proxy.spool.segments import Piece
from proxy.tool_events import ResultReaders
from store.database import is_answering, is_lasting_refusal, is_read_only, prevents_all_storing
from store.errors import RecordRefused
from store.records import CallRecord, SpoolRecord
from store.values.packing import ITEM_BYTES
from store.write.ingest import Ingester

log = structlog.get_logger()

# Pause before a dead letter that could not be written to disk is tried again.
LETTER_RETRY_S: Final = 1.0
# Pause before a record that PostgreSQL did not store, although it answered, is tried again.
UNANSWERED_RETRY_S: Final = 30.0

# A reply longer than this, in bytes, is parsed in a thread, so that the drain goes on.
LONG_BYTES: Final = 2**20
# A long reply becomes a dead letter after so many ingesters ended (were killed) while reading it.
MOST_READINGS: Final = 3
READING_ENDS_INGESTERS: Final = f"{MOST_READINGS} ingesters ended while they read its reply"
# Longest time to read pieces, in seconds, before the records in them are stored.
READ_S: Final = 0.25

REASONS: Final[dict[HoldReason, str]] = {
    "letter": "a dead letter cannot be written to disk",
    "suspect": "storing a record fails, and none of its kind could be stored since",
    "unanswered": "PostgreSQL answers, and does not take a record",
}


def is_retry_due(held: HeldPiece, stored: dict[type, int], now: float) -> bool:
    """Return whether a held piece is to be tried again, at `now` by the monotonic clock.

    A suspect is due once another record of its type was stored (`stored`: the turn in which a
    record of each type was last stored). If it fails again then, the record itself is the cause.
    Before that, a bug that hits every record may be the cause, and must not turn all records into
    dead letters.
    """
    if held.why == "suspect":
        return held.kind is not None and stored.get(held.kind, -1) >= held.turn
    return now - held.at >= (LETTER_RETRY_S if held.why == "letter" else UNANSWERED_RETRY_S)


# After so many failures in a row while PostgreSQL answers, records are stored one by one: one of
# them may be the cause.
MOST_FAILURES: Final = 5
# The same limit while PostgreSQL is read-only, as it may be for a while after a failover: no record
# is the cause of that.
MOST_READ_ONLY_FAILURES: Final = 60
CANNOT_READ: Final = "a segment cannot be read or deleted"


class StoredBatch(NamedTuple):
    """The records that were stored, and how many were left out: their episodes are deleted."""

    records: Sequence[SpoolRecord]
    left_out: int


NOTHING_STORED: Final = StoredBatch((), 0)


class BatchWriter:
    """Settle the records of one drainer; callers must not settle two batches at once."""

    def __init__(
        self,
        root: Path,
        readers: ResultReaders,
        most_reply: int,
        redactor: Redactor | None = None,
        send_spans: Callable[[Iterable[SpoolRecord]], None] | None = None,
    ) -> None:
        """Write dead letters under `root`; read no replies longer than `most_reply` bytes.

        `redactor` is applied to every record before it is stored or becomes a dead letter.
        `send_spans` is called with stored records.
        """
        self._root = root
        self._readers = readers
        self._most_reply = most_reply
        self._redactor = redactor
        self._send_spans = send_spans
        self._ingester = Ingester(count_conflicts, count_late_feedback, question_digest)
        # The long reply that is being read.
        self._long: tuple[HeldPiece, asyncio.Task[list[Entry]]] | None = None
        self._turn = 0
        # The turn in which a record of each type was last stored.
        self._stored: dict[type, int] = {}
        # Number of failures of PostgreSQL, while it answered, since a record was last stored.
        self.failures = 0
        # Why a record could not be settled in the present turn, although PostgreSQL answers.
        self.trouble = ""

    @property
    def one_by_one(self) -> bool:
        """Return whether to settle one record at a time, because one may cause the failures."""
        return self.failures >= MOST_FAILURES

    def begin_turn(self) -> None:
        """Begin another turn of the drain, and clear the last one's `trouble`."""
        self._turn += 1
        self.trouble = ""

    async def count_error(self, engine: AsyncEngine, error: Exception) -> bool:
        """Count a failed turn; return whether PostgreSQL answers, but has failed too often.

        While PostgreSQL does not answer, nothing is counted: no record is the cause of that.
        """
        if not (is_lasting_refusal(error) or await is_answering(engine)):
            return False
        self.failures += 1
        patience = MOST_READ_ONLY_FAILURES if is_read_only(error) else MOST_FAILURES
        return bool(self.trouble) or self.failures >= patience

    @property
    def is_reading_long_reply(self) -> bool:
        return self._long is not None

    def read(self, pieces: Iterable[Piece], at_once: float = LONG_BYTES) -> list[Entry]:
        """Read pieces of a segment in order: each as a redacted record, or why it has none.

        The last pieces are left out if reading takes too long. A call whose reply is longer than
        `at_once` bytes is not read; its reason is `TAKES_LONG`.
        """
        entries, began = [], monotonic()
        for piece in pieces:
            entry = read_entry(piece, self._readers, self._most_reply, at_once)
            if self._redactor is not None and entry.record is not None:
                entry = entry._replace(record=self._redactor.redact_record(entry.record))
            entries.append(entry)
            if monotonic() - began > READ_S:
                break
        return entries

    async def settle(self, engine: AsyncEngine, segment: Segment, entries: Sequence[Entry]) -> None:
        """Settle entries of a segment; halve a batch that fails until the failing record is alone.

        If the database goes away in the middle, settled entries stay settled.

        Raises:
            Exception: the database is away (`store.database.prevents_all_storing`).
        """
        try:
            stored = await self._store(engine, entries)
        except Exception as error:
            if len(entries) == 1:
                await self._settle_failed(engine, segment, entries[0], error)
            elif prevents_all_storing(error):
                raise
            else:
                middle = len(entries) // 2
                await self.settle(engine, segment, entries[:middle])
                await self.settle(engine, segment, entries[middle:])
            return
        unread = [entry for entry in entries if entry.record is None]
        for entry in unread:
            if entry.reason == TAKES_LONG:
                self._hold(segment, entry, "long", TAKES_LONG)
        await self._write_letters(segment, [e for e in unread if e.reason != TAKES_LONG])
        # No `await` between counting and advancing: a cancelled drain has done both or neither.
        self._count(stored)
        settled = (e.piece.records for e in entries if e.piece.start not in segment.held)
        segment.advance(entries[-1].piece, sum(settled))

    async def _store(self, engine: AsyncEngine, entries: Sequence[Entry]) -> StoredBatch:
        """Store the records among `entries`; errors are those of `Ingester.store`."""
        records = [entry.record for entry in entries if entry.record is not None]
        if not records:
            return NOTHING_STORED
        left_out = await self._ingester.store(engine, records)
        self.failures = 0
        self._stored |= {type(record): self._turn for record in records}
        if left_out:
            records = [record for record in records if record.id not in left_out]
        return StoredBatch(records, len(left_out))

    def _count(self, stored: StoredBatch) -> None:
        STORED.inc(len(stored.records))
        if stored.left_out:
            DELETED.inc(stored.left_out)
            log.info("records_of_deleted_episodes", records=stored.left_out)
        count_calls(stored.records)
        if self._send_spans is not None:
            self._send_spans(stored.records)

    async def _settle_failed(
        self, engine: AsyncEngine, segment: Segment, entry: Entry, error: Exception
    ) -> None:
        """Hold a record that failed alone in its batch, or write it as a dead letter.

        Raises:
            Exception: the database is away; the record itself may be sound.
        """
        if isinstance(error, RecordRefused):
            await self._write_letters(segment, [entry._replace(reason=str(error))])
            if entry.piece.start not in segment.held:
                segment.advance(entry.piece, entry.piece.records)
        elif not prevents_all_storing(error):
            # The error's text is left out: it may quote the record.
            log.error("record_held", error=type(error).__name__, raised_at=raised_at(error))
            self._hold(segment, entry, "suspect", _reason(error))
        else:
            blamed = self.one_by_one and not is_read_only(error)
            if blamed and await is_answering(engine):
                log.error("record_held", error=type(error).__name__)
                self._hold(segment, entry, "unanswered", _reason(error))
            raise error

    def _hold(self, segment: Segment, entry: Entry, why: HoldReason, reason: str) -> None:
        kind = None if entry.record is None else type(entry.record)
        # Keep its bytes only on disk: there may be any number of such records.
        piece = entry.piece._replace(data=b"")
        segment.hold(HeldPiece(piece, why, reason, kind, self._turn, monotonic()))

    async def _write_letters(self, segment: Segment, entries: Sequence[Entry]) -> bool:
        """Write entries as dead letters; if the disk refuses, hold them and return False."""
        if not entries:
            return True
        # Names are unique to a record, and the same if the next ingester writes it after a kill.
        letters = [
            DeadLetter(f"{segment.path.stem}-{entry.piece.end}", *self._letter_and_reason(entry))
            for entry in entries
        ]
        try:
            await asyncio.to_thread(write_dead_letters, self._root, letters)
        except OSError as error:
            log.error("dead_letters_wait", letters=len(letters), reason=str(error))
            for entry in entries:
                self._hold(segment, entry._replace(record=None), "letter", entry.reason)
            return False
        DEAD_LETTERS.inc(sum(entry.piece.records for entry in entries))
        for letter in letters:
            # Only the first line: the following ones may quote the record.
            log.error(
                "dead_letter", reason=letter.reason.partition("\n")[0][:300], letter=letter.name
            )
        return True

    def _letter_and_reason(self, entry: Entry) -> tuple[bytes, str]:
        """Return the bytes and the reason of an entry's dead letter, redacted."""
        if self._redactor is None:
            return entry.piece.data, entry.reason
        return self._redactor.redact_letter(entry)

    async def try_held(self, engine: AsyncEngine, segments: Iterable[Segment]) -> int:
        """Try again the held pieces that are due, and return how many of them were settled."""
        moved = 0
        # A long reply that was read, but whose segment is gone, is discarded below.
        read = self._long if self._long is not None and self._long[1].done() else None
        for segment in segments:
            for held in sorted(segment.held.values()):
                if held.why == "long":
                    moved += await self._try_long(engine, segment, held)
                    continue
                if is_retry_due(held, self._stored, monotonic()):
                    moved += await self._try_again(engine, segment, held)
                if held.piece.start in segment.held:
                    self.trouble = REASONS[held.why]
        if self._long is read:
            self._long = None
        return moved

    async def _try_long(self, engine: AsyncEngine, segment: Segment, held: HeldPiece) -> bool:
        """Start to read a long reply in a thread, or settle it once it is read.

        One reply is read at a time.

        Returns:
            Whether it was settled.

        Raises:
            Exception: the database is away.
        """
        if self._long is None and segment.not_before <= monotonic():
            reading = asyncio.to_thread(self._read_long, segment, held.piece)
            self._long = held, asyncio.create_task(reading)
        if self._long is None or self._long[0] is not held or not self._long[1].done():
            return False
        task = self._long[1]
        self._long = None
        try:
            entries = task.result()
        except OSError as error:
            self._note_read_error(segment, error)
            return False
        await self.settle(engine, segment, entries)
        if segment.held.get(held.piece.start) is not held:
            return False
        segment.forget_held(held)
        return True

    def _note_read_error(self, segment: Segment, error: OSError) -> None:
        segment.pause_after_failure(error)
        self.trouble = CANNOT_READ

    def _read_long(self, segment: Segment, piece: Piece) -> list[Entry]:
        piece = piece._replace(data=segment.read(piece.begin, piece.end))
        if segment.begin_reading(piece) >= MOST_READINGS:
            return [Entry(piece, None, READING_ENDS_INGESTERS)]
        entries = self.read([piece], inf)
        segment.end_reading()
        return entries

    async def _try_again(self, engine: AsyncEngine, segment: Segment, held: HeldPiece) -> bool:
        """Store a held record, or write it as a dead letter; return whether it was settled.

        Raises:
            Exception: the database is away.
        """
        begin, end = held.piece.begin, held.piece.end
        try:
            data = await asyncio.to_thread(segment.read, begin, end)
        except OSError as error:
            self._note_read_error(segment, error)
            return False
        piece = held.piece._replace(data=data)
        entry = Entry(piece, None, held.reason)
        if held.why != "letter":
            [entry] = self.read([piece])
            try:
                self._count(await self._store(engine, [entry]))
            except Exception as error:
                if prevents_all_storing(error):
                    if held.why == "suspect" or not await is_answering(engine):
                        raise
                    self._hold(segment, entry, held.why, held.reason)
                    return False
                entry = Entry(piece, None, _reason(error))
        if entry.record is None and not await self._write_letters(segment, [entry]):
            return False
        segment.forget_held(held)
        return True


def _reason(error: Exception) -> str:
    if isinstance(error, RecordRefused):
        return str(error)
    return f"{type(error).__name__} at {raised_at(error)}: {error}"


def count_calls(records: Iterable[SpoolRecord]) -> None:
    """Count the calls among stored records.

    This never raises: the records are stored, and must not be treated as failed.
    """
    try:
        tokens: Counter[tuple[str, str]] = Counter()
        for record in records:
            if isinstance(record, CallRecord):
                policy = record.policy or ""
                tokens[policy, "prompt"] += len(record.tokens.prompt_ids) // ITEM_BYTES
                tokens[policy, "sampled"] += len(record.tokens.sampled_ids) // ITEM_BYTES
                _count_call(record)
        # Once for a batch: counting takes longer than adding up.
        for labels, number in tokens.items():
            labelled(TOKENS, *labels).inc(number)
    except Exception:
        log.exception("calls_not_counted")


def count_conflicts(requests: Sequence[UUID]) -> None:
    """Count feedback that was stored although its idempotency key belongs to another body."""
    KEY_CONFLICTS.inc(len(requests))
    log.warning("idempotency_key_reused", stored=[str(request) for request in requests[:10]])


def count_late_feedback(statements: Mapping[str, int]) -> None:
    """Count feedback that came after its episode was trained on, by policy."""
    for policy, count in statements.items():
        LATE.labels(policy).inc(count)


def _count_call(record: CallRecord) -> None:
    if record.reason is not None:
        labelled(NOT_TRAINABLE, record.reason).inc()
    for event in record.tool_events:
        labelled(TOOL_STATUS, event.status).inc()
