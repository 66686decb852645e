"""Write one worker's segments: bytes are durable, or cut off again.

`SegmentWriter` never raises: a disk that fails now may work in a moment, and the writer must still
run then. Failures are logged, and `append` returns False.

Beside the present segment there is an empty segment with allocated disk blocks: the reserve. The
gaps of lost records are written to it (`append_to_reserve`) while the disk has no room for other
data. Once it is used up, one mark of fixed size says that records were lost
(`proxy.spool.outages`).
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Final

import structlog

from proxy.spool.folders import OPEN_SUFFIX, SEALED_SUFFIX, WorkerFolder
from proxy.spool.outages import OutageFile
from proxy.spool.segments import PROCESS_MARK
from store.files import sync
from store.ids import new_id

log = structlog.get_logger()

# Allocate blocks beyond a file's end, and leave its size as it is (fallocate(2)).
_KEEP_SIZE: Final = 1


class SegmentFile:
    """A new segment file, open for appending."""

    def __init__(self, folder: Path, *, allocated: int = 0) -> None:
        """Create the file in `folder`, with `allocated` bytes of disk blocks.

        Raises:
            OSError: the disk refuses it; the file is deleted if possible.
        """
        self.path = folder / f"{new_id()}_{PROCESS_MARK.hex()}{OPEN_SUFFIX}"
        self.size = 0
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            if allocated:
                _allocate(self._file, allocated)
            # The new file's name must be durable too.
            sync(folder)
        except OSError:
            os.close(self._file)
            self.path.unlink(missing_ok=True)
            raise

    def is_removed(self) -> bool:
        """Return whether the file was deleted.

        Raises:
            OSError: the file cannot be examined.
        """
        return os.fstat(self._file).st_nlink == 0

    def append(self, data: bytes) -> None:
        """Make `data` durable at the end.

        Raises:
            OSError: the disk refuses it; a part may be in the file (see `cut_failed_bytes`).
        """
        view = memoryview(data)
        while view:
            written = os.write(self._file, view)
            if not written:
                raise OSError(errno.EIO, "nothing was written")
            view = view[written:]
        os.fdatasync(self._file)
        self.size += len(data)

    def cut_failed_bytes(self) -> None:
        """Cut off the bytes that a failed `append` left.

        Raises:
            OSError: the disk refuses it.
        """
        os.ftruncate(self._file, self.size)

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: see close(2); the descriptor is released all the same.
        """
        os.close(self._file)


def _allocate(file: int, size: int) -> None:
    """Allocate `size` bytes of disk blocks for a file, and leave its size unchanged.

    Raises:
        OSError: the disk has no room, or this system or file system cannot do it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fallocate = libc.fallocate64
    except AttributeError as error:
        raise OSError(errno.ENOTSUP, "this system has no fallocate") from error
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(file, _KEEP_SIZE, 0, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


# Enough for the gaps of some 20,000 lost records, several of which share a frame.
RESERVE_BYTES: Final = 2**20


class SegmentWriter:
    """Write one segment after another into a folder; only one thread may use it."""

    def __init__(
        self, take: Callable[[], WorkerFolder], home: WorkerFolder | None, *, segment_bytes: int
    ) -> None:
        """Write into the folder `home`; if it is None, call `take` for one when it is needed."""
        self._take = take
        self._home = home
        self._segment_bytes = segment_bytes
        self._segment: SegmentFile | None = None
        self._reserve: SegmentFile | None = None
        self._reserve_failed = False
        # Segments that will not grow any more, but could not be renamed yet.
        self._unsealed: list[Path] = [] if home is None else home.left_open
        self._outage: OutageFile | None = None
        # Whether the last use of the outage file failed. The argument `named` of an `end_outage`
        # that could not be written yet, else None.
        self._outage_failed = False
        self._ending: bool | None = None
        # Unix time at which the first record was lost whose loss could not be marked; infinity if
        # there is none. Marking may work again while the disk still has no room for gaps.
        self._unmarked_since = inf
        self._open_outage()

    def append(self, data: bytes) -> bool:
        """Make `data` durable at the segment's end, and return whether that worked.

        Bytes that failed are cut off, and the segment is ended, for two reasons. The ingester may
        have read them, so no others may take their offsets. And after a failed sync it is not
        known how much of the segment's end is on disk.
        """
        try:
            segment = self._ready_segment()
            begins = segment.size == 0
            segment.append(data)
        except Exception as error:
            log.error("spool_write_failed", bytes=len(data), reason=_text(error))
            self._end_failed_segment()
            return False
        if begins:
            # The disk works, perhaps again.
            self._open_outage()
            self._renew_reserve(segment.path.parent)
        if segment.size >= self._segment_bytes:
            self.seal()
        return True

    def append_to_reserve(self, data: bytes) -> bool:
        """Make `data` durable in the reserve, and return whether that worked.

        A full disk does not refuse it, unless the reserve is used up.
        """
        reserve = self._reserve
        if reserve is None or reserve.size + len(data) > RESERVE_BYTES:
            return False
        try:
            if reserve.is_removed():
                log.error("segment_removed", segment=str(reserve.path), by="somebody else")
                self._reserve = None
                _close(reserve)
                return False
            reserve.append(data)
        except Exception as error:
            log.error("spool_mark_failed", bytes=len(data), reason=_text(error))
            self._reserve = None
            self._end(reserve, cut=True)
            return False
        return True

    def begin_outage(self) -> None:
        """Mark durably, without needing disk space, that records are lost from now on.

        The outage begins with the earliest loss that could not be marked.
        """
        self._ending = None
        self._unmarked_since = min(self._unmarked_since, time.time())
        self._open_outage()
        if self._outage is None:
            return
        try:
            if self._outage.mark_records_lost_from(self._unmarked_since):
                log.error(
                    "recording_outage_began",
                    reason="records are lost, and no room is left for names",
                )
            self._unmarked_since = inf
        except Exception as error:
            self._close_failed_outage(error)

    def end_outage(self, *, named: bool) -> None:
        """End the outage, if one lasts: records can be written again.

        `named`: gaps name all episodes that lost a record meanwhile.
        """
        self._ending = named
        if self._outage is None:
            return
        try:
            if self._unmarked_since < inf and not named:
                self._outage.mark_records_lost_from(self._unmarked_since)
            outage = self._outage.mark_records_lost_until(time.time(), named=named)
        except Exception as error:
            # `seal` tries again.
            self._close_failed_outage(error)
            return
        self._ending, self._unmarked_since = None, inf
        if outage is not None and outage.until is not None:
            log.warning("recording_outage_ended", after_s=round(outage.until - outage.since, 3))

    def seal(self) -> None:
        """End the segment; the next `append` begins another one."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self._end(segment)
        self._unsealed = [path for path in self._unsealed if not _rename_to_sealed(path)]
        if self._ending is not None:
            self._open_outage()
            self.end_outage(named=self._ending)

    def release(self) -> None:
        """End the segment and the reserve, and unlock the folder."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            self._end(reserve)
        self.seal()
        if self._outage is not None:
            self._outage.close()
            self._outage = None
        if self._home is not None:
            self._home.release()
            self._home = None

    def _ready_segment(self) -> SegmentFile:
        if self._segment is not None and self._segment.is_removed():
            log.error("segment_removed", segment=str(self._segment.path), by="somebody else")
            segment, self._segment = self._segment, None
            _close(segment)
        if self._segment is None:
            if self._home is not None and self._home.is_lost():
                self._abandon_folder(self._home)
            if self._home is None:
                self._home = self._take()
                self._unsealed += self._home.left_open
            self._segment = SegmentFile(self._home.folder)
        return self._segment

    def _abandon_folder(self, home: WorkerFolder) -> None:
        """Close the files of a folder that somebody removed; another folder is locked next.

        An outage that lasts goes on, though its file is gone.
        """
        log.error("spool_removed", folder=str(home.folder), by="somebody else")
        reserve, self._reserve = self._reserve, None
        outage, self._outage = self._outage, None
        if outage is not None:
            self._unmarked_since = min(self._unmarked_since, outage.lasts_since)
            _close(outage)
        if reserve is not None:
            _close(reserve)
        self._home = None
        home.release()

    def _renew_reserve(self, folder: Path) -> None:
        """Make an empty reserve unless there is one, if the disk has room."""
        reserve = self._reserve
        if reserve is not None and reserve.size == 0:
            return
        try:
            self._reserve = SegmentFile(folder, allocated=RESERVE_BYTES)
        except Exception as error:
            if not self._reserve_failed:
                # Until there is a reserve, gaps are kept in memory.
                log.warning("no_reserve", folder=str(folder), reason=_text(error))
            self._reserve_failed = True
            return
        self._reserve_failed = False
        if reserve is not None:
            self._end(reserve)

    def _open_outage(self) -> None:
        """Open the outage file unless it is open, and end the outage of a killed worker."""
        if self._outage is not None or self._home is None:
            return
        try:
            outage = OutageFile(self._home.folder)
        except Exception as error:
            self._close_failed_outage(error)
            return
        self._outage, self._outage_failed = outage, False
        if outage.is_lasting and self._ending is None:
            self.end_outage(named=False)

    def _close_failed_outage(self, error: Exception) -> None:
        """Close the outage file after `error`; it is opened again when it is needed."""
        if not self._outage_failed:
            log.error(
                "recording_outage_not_marked", reason=_text(error), kept="in this worker's memory"
            )
        self._outage_failed = True
        outage, self._outage = self._outage, None
        if outage is not None:
            _close(outage)

    def _end_failed_segment(self) -> None:
        """Cut off the bytes that failed, if the disk allows it, and end the segment."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self._end(segment, cut=True)
        self.seal()

    def _end(self, segment: SegmentFile, *, cut: bool = False) -> None:
        """Close a segment; delete it if it is empty, so that empty files do not gather.

        `cut`: the last append failed, so its bytes are cut off.
        """
        kept = segment.size > 0
        try:
            if cut:
                segment.cut_failed_bytes()
            if not kept:
                segment.path.unlink(missing_ok=True)
        except OSError as error:
            # Its intact frames will be stored, though their records were reported as lost.
            log.error("spool_not_cut", segment=str(segment.path), reason=_text(error))
            kept = True
        _close(segment)
        if kept:
            self._unsealed.append(segment.path)


def _close(file: SegmentFile | OutageFile) -> None:
    try:
        file.close()
    except OSError as error:
        # Linux releases the descriptor all the same (close(2)). Acknowledged bytes are synced.
        log.error("segment_not_closed", reason=_text(error))


def _rename_to_sealed(path: Path) -> bool:
    """Rename a finished segment; return False if that must be tried again."""
    try:
        path.rename(path.with_suffix(SEALED_SUFFIX))
    except FileNotFoundError:
        log.error("segment_removed", segment=str(path), by="somebody else")
    except OSError as error:
        log.error("segment_not_sealed", segment=str(path), reason=_text(error))
        return False
    return True


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
