"""Segments on their way into the database: how far each is counted, and how far it is stored.

How far it is stored stands beside it, in `ID.at`, so that the keeper after a killed one goes
on from there. It needs no sync: after a crash of the machine a record is stored again, which
changes nothing. For the same reason one that cannot be written, or not be read, costs nothing else.
"""

import os
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple
from zlib import crc32

import structlog

from proxy.keeping.held import Held
from proxy.segments import NUMBERS, Piece, read_pieces
from proxy.spooling.folders import OPEN, SEALED, is_held

log = structlog.get_logger()

AT: Final = ".at"
# So much of a segment is read at once.
READ_BYTES: Final = 4 * 2**20
# One that failed is tried again after so long.
RETRY_S: Final = 1.0
# Offset, number of the frame there and one more (0: not known), and a checksum of both.
_MARK: Final = struct.Struct(">QQ")
_CHECK: Final = struct.Struct(">I")
# All there was in the mark of an earlier Pawl: the offset.
_MARK_BEFORE: Final = struct.Struct(">Q")


class Place(NamedTuple):
    """Where a piece begins, and the number of the frame there, where it is known."""

    offset: int
    number: int | None


BEGIN: Final = Place(0, None)


class Segment:
    """One of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = path.with_suffix(AT)
        self._frames_mark = _mark_of(path.stem)
        self._marked = True
        self.stored = self._read_place()
        self.counted = self.stored
        # Records between the two, and those that are held.
        self.waiting = 0
        # What was passed over, by where it begins.
        self.held: dict[int, Held] = {}
        # It is drained to its end, and only has to be deleted.
        self.drained = False
        # It could not be read; it is tried again from then on (seconds of the monotonic clock).
        self.not_before = 0.0

    @property
    def sealed(self) -> bool:
        """Whether it will not grow: it was sealed, or who wrote it is gone."""
        return self.path.suffix == SEALED or not is_held(self.path.parent / "lock")

    def grown(self) -> bool:
        """Return whether there is more of it than was counted."""
        return self._existing().stat().st_size > self.counted.offset

    def pieces(self, place: Place, most: int | None, *, sealed: bool) -> list[Piece]:
        """Return the first pieces from `place` on, as many as one read brings, at most `most`.

        Raises:
            OSError: it cannot be read.
        """
        size = READ_BYTES
        while True:
            data, whole = self._read(place.offset, size)
            found = read_pieces(
                data,
                base=place.offset,
                mark=self._frames_mark,
                number=place.number,
                ended=sealed and whole,
            )
            pieces = list(islice(found, most))
            if pieces or whole:
                return pieces
            # The first frame is longer than that.
            size *= 2

    def read(self, begin: int, end: int) -> bytes:
        """Return these bytes of it.

        Raises:
            OSError: it cannot be read.
        """
        return self._read(begin, end - begin)[0]

    def _read(self, offset: int, size: int) -> tuple[bytes, bool]:
        """At most `size` bytes from `offset` on, and whether that is all there is."""
        with self._existing().open("rb") as file:
            file.seek(offset)
            data = file.read(size)
            return data, len(data) < size or not file.read(1)

    def _existing(self) -> Path:
        # Its worker may seal it at any moment.
        if not self.path.exists():
            self.path = self.path.with_suffix(SEALED)
        return self.path

    def count(self, piece: Piece) -> int:
        """Count the records of a piece; returns how many were not counted before."""
        if piece.end <= self.counted.offset:
            return 0
        self.counted = Place(piece.end, piece.number)
        self.waiting += piece.records
        return piece.records

    def advance(self, piece: Piece, records: int) -> None:
        """Go on behind `piece`; so many more records are settled."""
        self.stored = Place(piece.end, piece.number)
        self.waiting -= records
        self._mark()

    def hold(self, held: Held) -> None:
        """Go on behind a piece that is kept for later; its bytes stay where they are."""
        self.held[held.piece.start] = held
        if held.piece.end > self.stored.offset:
            self.advance(held.piece, 0)

    def release(self, held: Held) -> None:
        """Let go of a piece that was held and is settled now."""
        del self.held[held.piece.start]
        self.waiting -= held.piece.records
        self._mark()

    def _mark(self) -> None:
        """Write down how far a keeper after this one need not look: up to what is held first."""
        place = self.stored
        if self.held:
            first = self.held[min(self.held)].piece
            number = first.number
            before = None if number is None else (number - first.records) % NUMBERS
            place = Place(first.start, before)
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

    def _read_place(self) -> Place:
        """Where the keeper before this one was; the beginning, if that cannot be read."""
        try:
            data = self._at.read_bytes()
            size = self._existing().stat().st_size
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

    def failed(self, error: OSError) -> None:
        """Leave it alone for a moment: it could not be read or deleted, and the others go on."""
        self.not_before = monotonic() + RETRY_S
        log.error("segment_failed", segment=self.path.stem, reason=str(error))

    def remove(self) -> None:
        """Delete it, under whichever name it has by now.

        Raises:
            OSError: the disk did not.
        """
        for suffix in (OPEN, SEALED, AT):
            self.path.with_suffix(suffix).unlink(missing_ok=True)


def _parsed(data: bytes) -> Place | None:
    if len(data) == _MARK_BEFORE.size:
        return Place(_MARK_BEFORE.unpack(data)[0], None)
    if len(data) != _MARK.size + _CHECK.size:
        return None
    fields = data[: _MARK.size]
    if _CHECK.unpack(data[_MARK.size :])[0] != crc32(fields):
        return None
    offset, number = _MARK.unpack(fields)
    return Place(offset, number - 1 if number else None)


def _mark_of(stem: str) -> bytes | None:
    """The mark of a segment's frames, which its name tells; None where an earlier Pawl wrote it."""
    try:
        return bytes.fromhex(stem.partition("_")[2]) or None
    except ValueError:
        return None


def segment_files(root: Path) -> Iterator[tuple[str, Path]]:
    """What the workers wrote, oldest first, by id: `ID.open` while it grows, then `ID.seg`."""
    found = {path.stem: path for path in root.glob(f"*/*{OPEN}")}
    # One that was sealed meanwhile is seen under either name, or both.
    found |= {path.stem: path for path in root.glob(f"*/*{SEALED}")}
    yield from sorted(found.items())
