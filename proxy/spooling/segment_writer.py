"""The segment that a worker is writing: bytes are durable in it, or cut off again.

Nothing here raises: a disk that fails now may work in a moment, and whoever writes must be there
then. What failed is said in the log, and in what `append` returns.
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
        """Write into `home`; where there is none yet, `take` is asked for one when it is needed."""
        self._take = take
        self._home = home
        self._segment_bytes = segment_bytes
        self._segment: Path | None = None
        self._file: int | None = None
        self._size = 0
        # Segments that will not grow any more, and of which the name does not say so yet.
        self._unsealed: list[Path] = [] if home is None else home.left

    def append(self, data: bytes) -> bool:
        """Make `data` durable at the segment's end; False where the disk did not.

        Bytes that failed are cut off, and the segment ends: the keeper may have read them, so that
        nothing else may stand in their place; and after a sync that failed nobody knows what of
        the segment's end is on disk.
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
            log.error("spool_write_failed", bytes=len(data), reason=_said(error))
            self._give_up()
            return False
        self._size += len(data)
        if self._size >= self._segment_bytes:
            self.seal()
        return True

    def seal(self) -> None:
        """End the segment; the next bytes begin another one."""
        file, segment = self._file, self._segment
        self._file = self._segment = None
        if file is not None:
            _close(file)
        if segment is not None:
            self._unsealed.append(segment)
        self._unsealed = [path for path in self._unsealed if not _sealed(path)]

    def release(self) -> None:
        """End the segment, and let go of the folder."""
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
        """Take back what failed, as far as the disk lets us, and end the segment."""
        try:
            if self._file is not None:
                os.ftruncate(self._file, self._size)
            if self._segment is not None and self._size == 0:
                # One that holds nothing: a disk that fails for long must not be filled with them.
                self._segment.unlink(missing_ok=True)
                self._segment = None
        except OSError as error:
            # What of it is whole will be stored, though it was reported as lost.
            log.error("spool_not_cut", segment=str(self._segment), reason=_said(error))
        self.seal()


def _close(file: int) -> None:
    try:
        os.close(file)
    except OSError as error:
        # Linux lets go of it all the same; what was acknowledged was synced before.
        log.error("segment_not_closed", reason=_said(error))


def _sealed(path: Path) -> bool:
    """Give a segment the name of one that will not grow; False: the disk did not, so try later."""
    try:
        path.rename(path.with_suffix(SEALED))
    except FileNotFoundError:
        log.error("segment_removed", segment=str(path), by="somebody else")
    except OSError as error:
        log.error("segment_not_sealed", segment=str(path), reason=_said(error))
        return False
    return True


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
