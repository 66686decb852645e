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
