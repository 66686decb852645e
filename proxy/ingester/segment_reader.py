"""Read segments, and keep track of how far each is counted, and how far it is stored.

The offset up to which a segment is stored is kept beside it, in `ID.at`, so that a new ingester
goes on where a killed one stopped. That file is not synced: if it is lost, or cannot be read or
written, some records are stored a second time, which changes nothing in the database.
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

from proxy.spool.folders import OPEN_SUFFIX, SEALED_SUFFIX, is_held
from proxy.spool.segments import FRAME_NUMBERS, Piece, read_pieces

Result = TypeVar("Result")

log = structlog.get_logger()

PLACE_SUFFIX: Final = ".at"
# File beside a segment with a line for each time that an ingester began to read a long piece: the
# piece's offset.
BEGUN_SUFFIX: Final = ".begun"
# Bytes of a segment that are read at once.
READ_BYTES: Final = 4 * 2**20
# Pause before a segment that failed is tried again.
RETRY_S: Final = 1.0
# Content of `ID.at`: the offset, 1 + the number of the frame at the offset (0: unknown), and a
# checksum of both.
_PLACE: Final = struct.Struct(">QQ")
_CHECK: Final = struct.Struct(">I")


# Why a piece is held.
# `letter`: its dead letter cannot be written to disk yet.
# `suspect`: storing it raised an unexpected error, due to the record or to a bug that hits all.
# `unanswered`: PostgreSQL answers, but storing this record ends in an error of PostgreSQL's own.
# `long`: its reply is long, and is parsed in a thread.
HoldReason = Literal["letter", "suspect", "unanswered", "long"]


class HeldPiece(NamedTuple):
    """A piece that was passed over, to be stored or to become a dead letter later, and why.

    `kind` is its record's type, None for a letter. `turn` (as the batch writer counts turns) and
    `at` (seconds of the monotonic clock) say when it was last tried.
    """

    piece: Piece
    why: HoldReason
    reason: str
    kind: type | None
    turn: int
    at: float


class FramePlace(NamedTuple):
    """Where a piece begins: its offset, and its first frame's number (None: unknown)."""

    offset: int
    number: int | None


BEGIN: Final = FramePlace(0, None)


class Segment:
    """One segment file, and how far the ingester has counted and stored it."""

    def __init__(self, path: Path) -> None:
        """Read the position that an earlier ingester left beside the segment at `path`."""
        self.path = path
        self._at = path.with_suffix(PLACE_SUFFIX)
        self._frames_mark = _mark_of(path.stem)
        self._place_saved = True
        self.stored = self._read_place()
        self.counted = self.stored
        # Number of records that are counted and not settled, held ones included.
        self.waiting = 0
        # Held pieces, by the offset at which they begin.
        self.held: dict[int, HeldPiece] = {}
        # Whether all its pieces are settled or held; once none is held, the file can be deleted.
        self.drained = False
        # Whether there are more pieces after the last read.
        self.has_more = False
        # Expected bytes of the next batch, by the size of the last one.
        self._expected_bytes = READ_BYTES
        # Until when it is left alone after a failure (seconds of the monotonic clock).
        self.not_before = 0.0

    @property
    def sealed(self) -> bool:
        """Return whether the segment will not grow: it was sealed, or its worker is gone."""
        return self.path.suffix == SEALED_SUFFIX or not is_held(self.path.parent / "lock")

    def has_grown(self) -> bool:
        """Return whether the file has bytes beyond those that were counted."""
        return self._with_file(Path.stat).st_size > self.counted.offset

    def pieces(self, place: FramePlace, most: int | None, *, sealed: bool) -> list[Piece]:
        """Return the next pieces from `place` on: those of one read, at most `most` pieces.

        `sealed` says that the segment will not grow, so that an incomplete frame is damaged.

        Raises:
            OSError: it cannot be read.
        """
        size = READ_BYTES if most is None else min(READ_BYTES, self._expected_bytes)
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
                self._expect_batch_size(pieces if len(pieces) == most else [])
                return pieces
            # The first frame is longer than `size`.
            size *= 2

    def _expect_batch_size(self, batch: list[Piece]) -> None:
        """Expect the next batch to have a quarter more bytes than this one (empty: any number).

        Reading more at once is waste: bytes beyond a batch are read again for the next one.
        """
        taken = batch[-1].end - batch[0].start if batch else READ_BYTES
        self._expected_bytes = taken + taken // 4

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
            self.path = self.path.with_suffix(SEALED_SUFFIX)
        return self.path

    def count(self, piece: Piece) -> int:
        """Count the records of a piece, and return how many were not counted before."""
        if piece.end <= self.counted.offset:
            return 0
        self.counted = FramePlace(piece.end, piece.number)
        self.waiting += piece.records
        return piece.records

    def advance(self, piece: Piece, records: int) -> None:
        """Move `stored` to the end of `piece`, never back; `records` of it do not wait any more."""
        if piece.end > self.stored.offset:
            self.stored = FramePlace(piece.end, piece.number)
        self.waiting -= records
        self._save_place()

    def hold(self, held: HeldPiece) -> None:
        """Pass over a piece for now; its bytes stay in the file until it is settled."""
        self.held[held.piece.start] = held
        self.advance(held.piece, 0)

    def begin_reading(self, piece: Piece) -> int:
        """Note that a piece is being read; return how many ingesters ended while reading it."""
        path = self.path.with_suffix(BEGUN_SUFFIX)
        try:
            with path.open("a+") as file:
                file.seek(0)
                earlier = file.read().split().count(str(piece.begin))
                file.write(f"{piece.begin}\n")
        except OSError as error:
            # Read the piece all the same: on a full disk, only draining makes room.
            log.warning("reading_not_noted", segment=self.path.stem, reason=str(error))
            return 0
        return earlier

    def end_reading(self) -> None:
        """Delete the note of `begin_reading`: the piece was read.

        Raises:
            OSError: the note could not be deleted.
        """
        self.path.with_suffix(BEGUN_SUFFIX).unlink(missing_ok=True)

    def forget_held(self, held: HeldPiece) -> None:
        """Drop a held piece that was stored or became a dead letter, and save where to begin."""
        del self.held[held.piece.start]
        self.waiting -= held.piece.records
        self._save_place()

    def _save_place(self) -> None:
        """Save where another ingester would begin: at the first held piece, else at `stored`."""
        place = self.stored
        if self.held:
            first = self.held[min(self.held)].piece
            number = first.number
            before = None if number is None else (number - first.records) % FRAME_NUMBERS
            place = FramePlace(first.start, before)
        fields = _PLACE.pack(place.offset, 0 if place.number is None else place.number + 1)
        try:
            # In place and in one write: a kill leaves the old place or the new one.
            handle = os.open(self._at, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(handle, fields + _CHECK.pack(crc32(fields)), 0)
            finally:
                os.close(handle)
        except OSError as error:
            if self._place_saved:
                log.warning("segment_not_marked", segment=self.path.stem, reason=str(error))
            self._place_saved = False
        else:
            self._place_saved = True

    def _read_place(self) -> FramePlace:
        """Return the place that an earlier ingester saved, or the beginning if it is unreadable."""
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

        A worker deletes a segment that stayed empty. If the segment had records, they count as
        dropped at the next look.
        """
        names = (self.path.with_suffix(suffix) for suffix in (OPEN_SUFFIX, SEALED_SUFFIX))
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
        for suffix in (OPEN_SUFFIX, SEALED_SUFFIX, PLACE_SUFFIX, BEGUN_SUFFIX):
            self.path.with_suffix(suffix).unlink(missing_ok=True)


def _parsed(data: bytes) -> FramePlace | None:
    if len(data) != _PLACE.size + _CHECK.size:
        return None
    fields = data[: _PLACE.size]
    if _CHECK.unpack(data[_PLACE.size :])[0] != crc32(fields):
        return None
    offset, number = _PLACE.unpack(fields)
    return FramePlace(offset, number - 1 if number else None)


def _mark_of(stem: str) -> bytes | None:
    """Return the mark of a segment's frames, which is in its name; None if it is not."""
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
    by_stem = {path.stem: path for path in files_in_folders(root, f"*{OPEN_SUFFIX}")}
    # A segment that is sealed in between may be found under both names.
    by_stem |= {path.stem: path for path in files_in_folders(root, f"*{SEALED_SUFFIX}")}
    yield from sorted(by_stem.items())
