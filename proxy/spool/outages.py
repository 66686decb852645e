"""Keep a mark of fixed size: from one moment to another, records were lost and nobody knows whose.

Such a time is an outage. Its mark is written in place, over bytes that were allocated while the
disk had room, so that a full disk cannot refuse it; and it is durable before any call of that time
is answered, so that no kill loses it. Each worker's folder has one file of three pages:

    | state with an even number | state with an odd number | what is in the database |

A state is a number, an id, and two moments (Unix time in seconds; an end of 0: it lasts). Of the
worker's two pages the one with the higher number counts. If a write is torn, the state before it
counts: before a beginning nobody was answered yet, and before an end the outage still lasts.

One file holds one outage. If another begins before the last one is stored, both and the time
between become one.
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
PAGE: Final = 4096
PAGES: Final = 3
_STORED: Final = 2
# Magic, number, id, beginning and end.
_STATE: Final = struct.Struct("<8sQ16sdd")
_CHECK: Final = struct.Struct("<I")
_MAGIC: Final = b"\xf7PWoutag"
_NO_ID: Final = bytes(16)


class RecordingOutage(NamedTuple):
    """Mark a time in which records were lost; `until` is None while it lasts.

    Both moments are Unix time in seconds by the clock of the worker's machine.
    """

    id: bytes
    since: float
    until: float | None


class State(NamedTuple):
    """Hold what a file says: the worker's last outage, and what the ingester stored last."""

    number: int
    outage: RecordingOutage | None
    stored: RecordingOutage | None

    @property
    def not_stored(self) -> RecordingOutage | None:
        """Return the outage, unless all of it is stored."""
        return None if self.outage == self.stored else self.outage


def parse_state(data: bytes) -> State:
    """Return what the bytes of a file say; a page that is damaged says nothing (pure)."""
    pages = [_parsed(data[at * PAGE : (at + 1) * PAGE]) for at in range(PAGES)]
    number, outage = max(filter(None, pages[:_STORED]), default=(0, None), key=lambda page: page[0])
    stored_page = pages[_STORED]
    return State(number, outage, None if stored_page is None else stored_page[1])


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
    """Write the file of one folder; only the process that holds the folder's lock may do so."""

    def __init__(self, folder: Path) -> None:
        """Open it, or create it if the disk has room.

        Raises:
            OSError: the disk refuses it.
        """
        self._file = os.open(folder / OUTAGE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if (size := os.fstat(self._file).st_size) < PAGE * PAGES:
                # Written, and not only set aside: to overwrite it takes no block.
                _write(self._file, bytes(PAGE * PAGES - size), size)
                sync(folder)
            self._number, self._outage, _ = _read(self._file)
        except OSError:
            os.close(self._file)
            raise
        # The present outage holds an earlier one, of which nobody knows any names.
        self._joined = self.lasts
        # The latest moment that was seen while it lasted: the clock may be set back.
        self._latest = 0.0

    @property
    def lasts(self) -> bool:
        """Return whether an outage has begun and not ended."""
        return self._outage is not None and self._outage.until is None

    @property
    def lasts_since(self) -> float:
        """Return when the outage began that lasts (Unix time), or infinity if none lasts."""
        return self._outage.since if self.lasts and self._outage is not None else inf

    def begin(self, now: float) -> bool:
        """Let an outage begin at `now`; return False if one lasts already that has `now` in it.

        Raises:
            OSError: the disk refuses it: nothing is marked.
        """
        if os.fstat(self._file).st_nlink == 0:
            raise FileNotFoundError("somebody removed the file of outages")
        self._latest = max(self._latest, now)
        outage = self._outage
        if self.lasts and outage is not None and outage.since <= now:
            return False
        not_stored = _read(self._file).not_stored
        if not_stored is not None:
            # Also if it lasts and the clock was set back.
            self._joined |= not_stored.until is not None
            self._set(RecordingOutage(not_stored.id, min(not_stored.since, now), None))
        else:
            self._joined, self._latest = False, now
            self._set(RecordingOutage(new_id().bytes, now, None))
        return True

    def end(self, now: float, *, named: bool) -> RecordingOutage | None:
        """End the outage that lasts; return it, or None if there is none or it need not be stored.

        `named` says whether all episodes that lost a record since it began are marked by name. Then
        there was no outage, unless it holds an earlier one.

        Raises:
            OSError: the disk refuses it: the outage lasts.
        """
        if self._outage is None or self._outage.until is not None:
            return None
        ended = self._outage._replace(until=max(now, self._latest, self._outage.since))
        self._set(None if named and not self._joined else ended)
        return self._outage

    def _set(self, outage: RecordingOutage | None) -> None:
        # A page whose write failed may be half written: the next try takes the same one.
        _write(self._file, _packed(self._number + 1, outage), (self._number + 1) % _STORED * PAGE)
        self._number, self._outage = self._number + 1, outage

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_outage(path: Path) -> State:
    """Return what a file says; its worker may be writing it.

    Raises:
        OSError: it cannot be read.
    """
    return parse_state(path.read_bytes())


def note_stored(path: Path, outage: RecordingOutage) -> None:
    """Note in a file that PostgreSQL has an outage; only the ingester does so.

    Raises:
        OSError: the disk refuses it.
    """
    handle = os.open(path, os.O_WRONLY)
    try:
        _write(handle, _packed(0, outage), _STORED * PAGE)
    finally:
        os.close(handle)


def _read(handle: int) -> State:
    return parse_state(os.pread(handle, PAGE * PAGES, 0))


def _write(handle: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written
    os.fdatasync(handle)
