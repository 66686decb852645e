"""The segment that a worker is writing: bytes are durable in it, or cut off again.

Nothing here raises: a disk that fails now may work in a moment, and the writer must still run
then. Failures are logged, and `append` returns False.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from proxy.segments import MARK
from proxy.spooling.folders import OPEN, SEALED, Home
from store.files import sync
from store.ids import new_id

log = structlog.get_logger()


class SegmentWriter:
    """Writes one segment after another into a folder; used by one thread."""

    def __init__(self, take: Callable[[], Home], home: Home | None, *, segment_bytes: int) -> None:
        """Write into `home`; if it is None, call `take` for a folder once one is needed."""
        self._take = take
        self._home = home
        self._segment_bytes = segment_bytes
        self._segment: Path | None = None
        self._file: int | None = None
        self._size = 0
        # Segments that will not grow any more, but could not be renamed yet.
        self._unsealed: list[Path] = [] if home is None else home.left

    def append(self, data: bytes) -> bool:
        """Make `data` durable at the segment's end, and return whether that worked.

        Bytes that failed are cut off, and the segment ends there, for two reasons. The keeper may
        have read them, so no others may take their offsets. And after a failed sync it is not
        known how much of the segment's end is on disk.
        """
        try:
            file = self._ready()
            view = memoryview(data)
            while view:
                written = os.write(file, view)
                if not written:
                    raise OSError(errno.EIO, "nothing was written")
                view = view[written:]
            os.fdatasync(file)
        except Exception as error:
            log.error("spool_write_failed", bytes=len(data), reason=_text(error))
            self._give_up()
            return False
        self._size += len(data)
        if self._size >= self._segment_bytes:
            self.seal()
        return True

    def seal(self) -> None:
        """End the segment; the next `append` begins another one."""
        file, segment = self._file, self._segment
        self._file = self._segment = None
        if file is not None:
            _close(file)
        if segment is not None:
            self._unsealed.append(segment)
        self._unsealed = [path for path in self._unsealed if not _sealed(path)]

    def release(self) -> None:
        """End the segment, and unlock the folder."""
        self.seal()
        if self._home is not None:
            self._home.release()
            self._home = None

    def _ready(self) -> int:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            log.error("segment_removed", segment=str(self._segment), by="somebody else")
            file, self._file, self._segment = self._file, None, None
            _close(file)
        if self._file is not None:
            return self._file
        if self._home is None:
            self._home = self._take()
            self._unsealed += self._home.left
        segment = self._home.folder / f"{new_id()}_{MARK.hex()}{OPEN}"
        self._file = os.open(segment, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._segment, self._size = segment, 0
        # The new file's name must be durable too.
        sync(self._home.folder)
        return self._file

    def _give_up(self) -> None:
        """Cut off the bytes that failed, if the disk allows it, and end the segment."""
        try:
            if self._file is not None:
                os.ftruncate(self._file, self._size)
            if self._segment is not None and self._size == 0:
                # Deleted if empty: a disk that fails for long must not fill with empty segments.
                self._segment.unlink(missing_ok=True)
                self._segment = None
        except OSError as error:
            # Its whole frames will be stored, though their records were reported as lost.
            log.error("spool_not_cut", segment=str(self._segment), reason=_text(error))
        self.seal()


def _close(file: int) -> None:
    try:
        os.close(file)
    except OSError as error:
        # Linux releases the descriptor all the same (close(2)). What was acknowledged was synced.
        log.error("segment_not_closed", reason=_text(error))


def _sealed(path: Path) -> bool:
    """Rename a segment that will not grow any more; return False if that must be tried again."""
    try:
        path.rename(path.with_suffix(SEALED))
    except FileNotFoundError:
        log.error("segment_removed", segment=str(path), by="somebody else")
    except OSError as error:
        log.error("segment_not_sealed", segment=str(path), reason=_text(error))
        return False
    return True


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
