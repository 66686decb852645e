"""Making files durable."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have the disk keep `path` as it is now: a file's bytes, or a folder's names.

    Raises:
        OSError: the disk did not.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, and have the disk keep its bytes.

    Raises:
        OSError: the disk did not; what is there of the file is taken away again.
    """
    # One that is there may be readable by others, or be being read.
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
