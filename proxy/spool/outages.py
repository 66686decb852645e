"""Recording outages on disk: a time in which records of unknown episodes were lost.

The mark of an outage has a fixed size. It overwrites bytes that were written while the disk had
room, so a full disk cannot refuse it. It is durable before any call of the outage is answered, so
no kill loses it. Each worker's folder has one file of three pages:

    | worker's state, even number | worker's state, odd number | outage stored in the database |

A state is a number, an id, a beginning and an end (Unix seconds; an end of 0: it lasts). Of the
worker's two pages the one with the higher number counts. If a write is torn, the previous state
counts. That is correct: before a beginning no call was answered yet, and before an end the outage
still lasts.

A file holds one outage. An outage that begins before the last one is stored is merged with it, so
the merged outage also covers the time between them.
"""

import os
import struct
from math import inf
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from store.files import sync
from store.ids import new_id

OUTAGE: Final = "outage"
# A disk writes a page whole or not at all.
PAGE_BYTES: Final = 4096
PAGES: Final = 3
_STORED: Final = 2
# Magic, number, id, beginning and end.
_STATE: Final = struct.Struct("<8sQ16sdd")
_CHECK: Final = struct.Struct("<I")
_MAGIC: Final = b"\xf7PWoutag"
_NO_ID: Final = bytes(16)


class RecordingOutage(NamedTuple):
    """A time in which records were lost, in Unix seconds by the worker's clock.

    `until` is None while it lasts.
    """

    id: bytes
    since: float
    until: float | None


class OutageState(NamedTuple):
    """Contents of an outage file: the worker's last outage, and the ingester's last stored one."""

    number: int
    outage: RecordingOutage | None
    stored: RecordingOutage | None

    @property
    def unstored(self) -> RecordingOutage | None:
        """Return the worker's outage, or None if it is stored with its end, or there is none."""
        return None if self.outage == self.stored else self.outage


def parse_state(data: bytes) -> OutageState:
    """Parse an outage file; a damaged page counts as empty (pure)."""
    pages = [_parsed(data[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]) for at in range(PAGES)]
    number, outage = max(filter(None, pages[:_STORED]), default=(0, None), key=lambda page: page[0])
    stored_page = pages[_STORED]
    return OutageState(number, outage, None if stored_page is None else stored_page[1])


def _parsed(page: bytes) -> tuple[int, RecordingOutage | None] | None:
    fields = page[: _STATE.size]
    if page[_STATE.size : _STATE.size + _CHECK.size] != _CHECK.pack(crc32(fields)):
        return None
    magic, number, name, since, until = _STATE.unpack(fields)
    if magic != _MAGIC:
        return None
    return number, None if name == _NO_ID else RecordingOutage(name, since, until or None)


def _packed(number: int, outage: RecordingOutage | None) -> bytes:
    name, since, until = outage or (_NO_ID, 0.0, None)
    fields = _STATE.pack(_MAGIC, number, name, since, until or 0.0)
    return fields + _CHECK.pack(crc32(fields))


class OutageFile:
    """A worker's outage file; only the process that holds the folder's lock may use it."""

    def __init__(self, folder: Path) -> None:
        """Open the file, or create it if the disk has room.

        Raises:
            OSError: the disk refuses it.
        """
        self._file = os.open(folder / OUTAGE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if (size := os.fstat(self._file).st_size) < PAGE_BYTES * PAGES:
                # Zeros are written, not just allocated: overwriting them takes no new block.
                _write(self._file, bytes(PAGE_BYTES * PAGES - size), size)
                sync(folder)
            self._number, self._outage, _ = _read(self._file)
        except OSError:
            os.close(self._file)
            raise
        # Whether the outage was merged with an earlier one, whose episodes are unknown.
        self._merged = self.is_lasting
        # The latest time seen during the outage: the clock may be set back.
        self._latest = 0.0

    @property
    def is_lasting(self) -> bool:
        """Return whether an outage has begun and not ended."""
        return self._outage is not None and self._outage.until is None

    @property
    def lasts_since(self) -> float:
        """Return when the present outage began (Unix time), or infinity if none lasts."""
        return self._outage.since if self.is_lasting and self._outage is not None else inf

    def mark_records_lost_from(self, now: float) -> bool:
        """Mark on disk that records are lost from `now` on; return False if that is marked already.

        Raises:
            OSError: the write failed; nothing is marked.
        """
        if os.fstat(self._file).st_nlink == 0:
            raise FileNotFoundError("somebody removed the file of outages")
        self._latest = max(self._latest, now)
        outage = self._outage
        if self.is_lasting and outage is not None and outage.since <= now:
            return False
        unstored = _read(self._file).unstored
        if unstored is not None:
            # Merge with it, also if it lasts and the clock was set back.
            self._merged |= unstored.until is not None
            self._set(RecordingOutage(unstored.id, min(unstored.since, now), None))
        else:
            self._merged, self._latest = False, now
            self._set(RecordingOutage(new_id().bytes, now, None))
        return True

    def mark_records_lost_until(self, now: float, *, named: bool) -> RecordingOutage | None:
        """End the present outage; return it, or None if there is none or it was discarded.

        `named`: gaps name all episodes that lost a record since the outage began. The outage is
        then discarded, unless it was merged with an earlier one.

        Raises:
            OSError: the write failed; the outage lasts.
        """
        if self._outage is None or self._outage.until is not None:
            return None
        ended = self._outage._replace(until=max(now, self._latest, self._outage.since))
        self._set(None if named and not self._merged else ended)
        return self._outage

    def _set(self, outage: RecordingOutage | None) -> None:
        # A failed write may leave half a page: the next try writes the same page.
        _write(
            self._file, _packed(self._number + 1, outage), (self._number + 1) % _STORED * PAGE_BYTES
        )
        self._number, self._outage = self._number + 1, outage

    def close(self) -> None:
        os.close(self._file)


def read_outage(path: Path) -> OutageState:
    """Read an outage file, which its worker may be writing.

    Raises:
        OSError: it cannot be read.
    """
    return parse_state(path.read_bytes())


def mark_outage_stored(path: Path, outage: RecordingOutage) -> None:
    """Note in an outage file that PostgreSQL has stored `outage`; only the ingester calls this.

    Raises:
        OSError: the disk refuses it.
    """
    handle = os.open(path, os.O_WRONLY)
    try:
        _write(handle, _packed(0, outage), _STORED * PAGE_BYTES)
    finally:
        os.close(handle)


def _read(handle: int) -> OutageState:
    return parse_state(os.pread(handle, PAGE_BYTES * PAGES, 0))


def _write(handle: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
    os.fdatasync(handle)
