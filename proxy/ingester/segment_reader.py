"""Follow segments into the database: how far each is counted, and how far it is stored.

The offset up to which a segment is stored is kept beside it, in `ID.at`, so that a new ingester
goes on where a killed one stopped. That file is not synced: if it is lost, or cannot be read or
written, some records are stored a second time, which changes nothing.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from os.path import lexists
from pathlib import Path
from time import monotonic
from typing import Final, Literal, NamedTuple, TypeVar
from zlib import crc32

import structlog

from proxy.spool.folders import OPEN, SEALED, is_held
from proxy.spool.segments import NUMBERS, Piece, read_pieces

Result = TypeVar("Result")

log = structlog.get_logger()

AT: Final = ".at"
# File beside a segment: the offset of each long piece that an ingester began to read, a line each.
BEGUN: Final = ".begun"
# Bytes of a segment that are read at once.
READ_BYTES: Final = 4 * 2**20
# Pause before a segment that failed is tried again.
RETRY_S: Final = 1.0
# Content of `ID.at`: the offset, one more than the number of the frame there (0: not known),
# and a checksum of both.
_MARK: Final = struct.Struct(">QQ")
_CHECK: Final = struct.Struct(">I")


# `letter`: a dead letter that the disk does not take yet.
# `suspect`: storing it raised an unexpected error: the record's fault, or a bug that hits all.
# `unanswered`: PostgreSQL answers, but fails over this record and reports a fault of its own.
# `long`: its reply is long, and read beside the drain.
Why = Literal["letter", "suspect", "unanswered", "long"]


class HeldPiece(NamedTuple):
    """A piece that was passed over, and why.

    `kind` is its record's type, None for a letter. `turn` (as the batch writer counts them) and
    `at` (seconds of the monotonic clock) say when it was last tried.
    """

    piece: Piece
    why: Why
    reason: str
    kind: type | None
    turn: int
    at: float


class FramePlace(NamedTuple):
    """Where a piece begins: its offset, and the number of the frame there (None: unknown)."""

    offset: int
    number: int | None


BEGIN: Final = FramePlace(0, None)


class Segment:
    """One segment file, with the ingester's position in it."""

    def __init__(self, path: Path) -> None:
        """Read the position that an earlier ingester left beside the segment at `path`."""
        self.path = path
        self._at = path.with_suffix(AT)
        self._frames_mark = _mark_of(path.stem)
        self._marked = True
        self.stored = self._read_place()
        self.counted = self.stored
        # Number of records between `stored` and `counted`, and of held records.
        self.waiting = 0
        # Records that were passed over for now, by the offset at which they begin.
        self.held: dict[int, HeldPiece] = {}
        # Everything in it is settled or held; once nothing is held, the file can be deleted.
        self.drained = False
        # Whether there are more pieces after the last read.
        self.has_more = False
        # Expected bytes of the next batch, by the size of the last one.
        self._likely = READ_BYTES
        # After a failure: when it may be tried again (seconds of the monotonic clock).
        self.not_before = 0.0

    @property
    def sealed(self) -> bool:
        """Return whether it will not grow: it was sealed, or its worker is gone."""
        return self.path.suffix == SEALED or not is_held(self.path.parent / "lock")

    def has_grown(self) -> bool:
        """Return whether the file is longer than what was counted."""
        return self._with_file(Path.stat).st_size > self.counted.offset

    def pieces(self, place: FramePlace, most: int | None, *, sealed: bool) -> list[Piece]:
        """Return the first pieces from `place` on, as many as one read gives, at most `most`.

        Raises:
            OSError: it cannot be read.
        """
        size = READ_BYTES if most is None else min(READ_BYTES, self._likely)
        while True:
            data, whole = self._read(place.offset, size)
            unread = read_pieces(
                data,
                base=place.offset,
                mark=self._frames_mark,
                number=place.number,
                ended=sealed and whole,
            )
            pieces = list(islice(unread, most))
            if pieces or whole:
                self.has_more = not whole or len(pieces) == most
                self._enlarge_next_batch(pieces if len(pieces) == most else [])
                return pieces
            # The first frame is longer than `size`.
            size *= 2

    def _enlarge_next_batch(self, batch: list[Piece]) -> None:
        """Expect the next batch to be a quarter larger: bytes beyond a batch are read twice."""
        taken = batch[-1].end - batch[0].start if batch else READ_BYTES
        self._likely = taken + taken // 4

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from offset `begin` up to `end`.

        Raises:
            OSError: it cannot be read.
        """
        return self._read(begin, end - begin)[0]

    def _read(self, offset: int, size: int) -> tuple[bytes, bool]:
        """Return at most `size` bytes from `offset` on, and whether the file ends with them."""
        with self._with_file(lambda path: path.open("rb")) as file:
            file.seek(offset)
            data = file.read(size)
            return data, len(data) < size or not file.read(1)

    def _with_file(self, use: Callable[[Path], Result]) -> Result:
        """Return `use(path)` for the segment's path, or for its new path if it was renamed.

        Raises:
            OSError: `use` raised it.
        """
        try:
            return use(self._existing())
        except FileNotFoundError:
            # Its worker renamed it after the path was looked up.
            return use(self._existing())

    def _existing(self) -> Path:
        if not self.path.exists():
            self.path = self.path.with_suffix(SEALED)
        return self.path

    def count(self, piece: Piece) -> int:
        """Count the records of a piece, and return how many were not counted before."""
        if piece.end <= self.counted.offset:
            return 0
        self.counted = FramePlace(piece.end, piece.number)
        self.waiting += piece.records
        return piece.records

    def advance(self, piece: Piece, records: int) -> None:
        """Move on behind `piece`, of which `records` records are settled; never move back."""
        if piece.end > self.stored.offset:
            self.stored = FramePlace(piece.end, piece.number)
        self.waiting -= records
        self._save_place()

    def hold(self, held: HeldPiece) -> None:
        """Move on behind a piece that is kept for later; its bytes stay in the file."""
        self.held[held.piece.start] = held
        self.advance(held.piece, 0)

    def begin_reading(self, piece: Piece) -> int:
        """Note that a piece is being read; return how many ingesters ended while reading it."""
        path = self.path.with_suffix(BEGUN)
        try:
            with path.open("a+") as file:
                file.seek(0)
                earlier = file.read().split().count(str(piece.begin))
                file.write(f"{piece.begin}\n")
        except OSError as error:
            # Read it all the same: on a full disk, only draining makes room.
            log.warning("reading_not_noted", segment=self.path.stem, reason=str(error))
            return 0
        return earlier

    def end_reading(self) -> None:
        """Delete the note of `begin_reading`: the piece was read.

        Raises:
            OSError: the note could not be deleted.
        """
        self.path.with_suffix(BEGUN).unlink(missing_ok=True)

    def release(self, held: HeldPiece) -> None:
        """Forget a held piece, which is settled now."""
        del self.held[held.piece.start]
        self.waiting -= held.piece.records
        self._save_place()

    def _save_place(self) -> None:
        """Save where the next ingester has to begin: at the first held piece, if there is one."""
        place = self.stored
        if self.held:
            first = self.held[min(self.held)].piece
            number = first.number
            before = None if number is None else (number - first.records) % NUMBERS
            place = FramePlace(first.start, before)
        fields = _MARK.pack(place.offset, 0 if place.number is None else place.number + 1)
        try:
            # In place and in one write: a kill leaves the old mark or the new one.
            handle = os.open(self._at, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(handle, fields + _CHECK.pack(crc32(fields)), 0)
            finally:
                os.close(handle)
        except OSError as error:
            if self._marked:
                log.warning("segment_not_marked", segment=self.path.stem, reason=str(error))
            self._marked = False
        else:
            self._marked = True

    def _read_place(self) -> FramePlace:
        """Return the position of an earlier ingester, or the beginning if that cannot be read."""
        try:
            data = self._at.read_bytes()
            size = self._with_file(Path.stat).st_size
        except FileNotFoundError:
            return BEGIN
        except OSError as error:
            log.warning("segment_mark_unreadable", segment=self.path.stem, reason=str(error))
            return BEGIN
        place = _parsed(data)
        if place is None or place.offset > size:
            log.warning("segment_mark_damaged", segment=self.path.stem)
            return BEGIN
        return place

    def is_gone(self, error: OSError) -> bool:
        """Return whether `error` came because the segment is gone, under either name.

        Its worker deletes a segment that stayed empty. The records of any other segment count as
        dropped at the next look.
        """
        names = (self.path.with_suffix(suffix) for suffix in (OPEN, SEALED))
        return isinstance(error, FileNotFoundError) and not any(map(lexists, names))

    def pause_after_failure(self, error: OSError) -> None:
        """Leave the segment alone for `RETRY_S`; other segments are drained meanwhile."""
        self.not_before = monotonic() + RETRY_S
        log.error("segment_failed", segment=self.path.stem, reason=str(error))

    def remove(self) -> None:
        """Delete the segment, under either name, and the files beside it.

        Raises:
            OSError: it could not be deleted.
        """
        for suffix in (OPEN, SEALED, AT, BEGUN):
            self.path.with_suffix(suffix).unlink(missing_ok=True)


def _parsed(data: bytes) -> FramePlace | None:
    if len(data) != _MARK.size + _CHECK.size:
        return None
    fields = data[: _MARK.size]
    if _CHECK.unpack(data[_MARK.size :])[0] != crc32(fields):
        return None
    offset, number = _MARK.unpack(fields)
    return FramePlace(offset, number - 1 if number else None)


def _mark_of(stem: str) -> bytes | None:
    """Return the frames' mark from a segment's name; None if it has none."""
    try:
        return bytes.fromhex(stem.partition("_")[2]) or None
    except ValueError:
        return None


def files_in_folders(root: Path, pattern: str) -> Iterator[Path]:
    """Yield files that match `pattern` in a spool's folders; skip folders that vanish meanwhile."""
    for folder in root.glob("*"):
        with suppress(FileNotFoundError):
            yield from list(folder.glob(pattern))


def segment_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the stem and path of each segment, oldest first.

    A segment is `ID.open` while it grows, and `ID.seg` after that.
    """
    by_stem = {path.stem: path for path in files_in_folders(root, f"*{OPEN}")}
    # A segment that is sealed in between is seen under either name, or both.
    by_stem |= {path.stem: path for path in files_in_folders(root, f"*{SEALED}")}
    yield from sorted(by_stem.items())
