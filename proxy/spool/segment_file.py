"""Write one segment: bytes are durable at its end, or an error is raised."""

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from proxy.spool.folders import OPEN
from proxy.spool.segments import MARK
from store.files import sync
from store.ids import new_id

# Allocate blocks beyond a file's end, and leave its size as it is (fallocate(2)).
_KEEP_SIZE: Final = 1


class SegmentFile:
    """Write a new segment file."""

    def __init__(self, folder: Path, *, allocated: int = 0) -> None:
        """Create it in `folder`, with `allocated` bytes of the disk set aside for it.

        Raises:
            OSError: the disk refuses it; nothing is left behind if the disk allows that.
        """
        self.path = folder / f"{new_id()}_{MARK.hex()}{OPEN}"
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
        """Return whether somebody deleted the file.

        Raises:
            OSError: the disk does not tell.
        """
        return os.fstat(self._file).st_nlink == 0

    def append(self, data: bytes) -> None:
        """Make `data` durable at the end.

        Raises:
            OSError: the disk refuses it; some of it may be in the file (`cut`).
        """
        view = memoryview(data)
        while view:
            written = os.write(self._file, view)
            if not written:
                raise OSError(errno.EIO, "nothing was written")
            view = view[written:]
        os.fdatasync(self._file)
        self.size += len(data)

    def cut(self) -> None:
        """Cut off what a failed `append` left.

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
    """Set aside `size` bytes of the disk for a file, whose size stays as it is.

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
