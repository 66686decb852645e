"""Segments on their way into the database: how far each is counted, and how far it is stored.

How far it is stored stands beside it, in `ID.at`, so that the keeper after a killed one goes
on from there. It needs no sync: after a crash of the machine a record is stored again, which
changes nothing.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from proxy.segments import read_frames
from proxy.spooling.folders import OPEN, SEALED, is_held

AT: Final = ".at"
# So much of a segment is read at once.
READ_BYTES: Final = 4 * 2**20


class Segment:
    """One of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mark = path.with_suffix(AT)
        self.stored = int.from_bytes(self._mark.read_bytes()) if self._mark.exists() else 0
        self.counted = self.stored
        # Frames between the two.
        self.waiting = 0

    @property
    def sealed(self) -> bool:
        """Whether it will not grow: it was sealed, or who wrote it is gone."""
        return self.path.suffix == SEALED or not is_held(self.path.parent / "lock")

    def grown(self) -> bool:
        """Whether there is more of it than was counted."""
        return self._existing().stat().st_size > self.counted

    def read(self, offset: int) -> bytes:
        """What is on disk from `offset` on, up to a limit that holds a whole frame."""
        with self._existing().open("rb") as file:
            file.seek(offset)
            data = file.read(READ_BYTES)
            while len(data) >= READ_BYTES and next(read_frames(data), None) is None:
                more = file.read(len(data))
                if not more:
                    break
                data += more
            return data

    def _existing(self) -> Path:
        # Its worker may seal it at any moment.
        if not self.path.exists():
            self.path = self.path.with_suffix(SEALED)
        return self.path

    def advance(self, stored: int, frames: int) -> None:
        """So many more frames are settled, up to this offset."""
        self.stored = stored
        self.waiting -= frames
        # In place and in one write: a kill leaves the old mark or the new one.
        handle = os.open(self._mark, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(handle, stored.to_bytes(8), 0)
        finally:
            os.close(handle)

    def remove(self) -> None:
        """Delete it, under whichever name it has by now."""
        for suffix in (OPEN, SEALED, AT):
            self.path.with_suffix(suffix).unlink(missing_ok=True)


def segment_files(root: Path) -> Iterator[tuple[str, Path]]:
    """What the workers wrote, oldest first, by id: `ID.open` while it grows, then `ID.seg`."""
    found = {path.stem: path for path in root.glob(f"*/*{OPEN}")}
    # One that was sealed meanwhile is seen under either name, or both.
    found |= {path.stem: path for path in root.glob(f"*/*{SEALED}")}
    yield from sorted(found.items())
