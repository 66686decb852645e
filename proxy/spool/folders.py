"""Locks on a spool's folders; a lock ends with the process that holds it."""

import errno
import fcntl
import os
from itertools import count
from pathlib import Path
from typing import Final

from proxy.errors import SpoolInUse

# Records hold prompts and replies: only the proxy's own user may read them.
PRIVATE_MODE: Final = 0o700
LOCK: Final = "lock"
OPEN_SUFFIX: Final = ".open"
SEALED_SUFFIX: Final = ".seg"
# Numbers of disk errors that may pass by themselves; any other is a mistake in the set-up.
PASSING_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}
)


class Lock:
    """An exclusive lock on a file, until `release` or the end of the process."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def is_lock_on(self, path: Path) -> bool:
        """Return whether `path` is still the locked file.

        Raises:
            OSError: the file cannot be examined.
        """
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def release(self) -> None:
        os.close(self._handle)


def lock_file(path: Path) -> Lock:
    """Lock a file; create it if it is missing.

    Raises:
        SpoolInUse: another process holds it.
        OSError: it cannot be created or locked.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise SpoolInUse(
            f"another process uses the spool directory {path.parent}: stop that process, or set "
            "PAWL_SPOOL_DIR to another directory"
        ) from error
    except OSError:
        os.close(handle)
        raise
    return Lock(handle)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock at `path`."""
    try:
        lock_file(path).release()
    except SpoolInUse:
        return True
    return False


class WorkerFolder:
    """A worker's own folder in the spool, locked for this process."""

    def __init__(self, folder: Path) -> None:
        """Lock `folder`; create it if it is missing.

        Raises:
            SpoolInUse: another process holds it.
            OSError: it cannot be created or written.
        """
        folder.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        self.folder = folder
        self._lock = lock_file(folder / LOCK)
        try:
            # Segments that an earlier worker left open; no process writes to them.
            self.left_open = sorted(folder.glob(f"*{OPEN_SUFFIX}"))
        except OSError:
            self._lock.release()
            raise

    def is_lost(self) -> bool:
        """Return whether the folder was removed or replaced.

        Raises:
            OSError: the lock file cannot be examined.
        """
        return not self._lock.is_lock_on(self.folder / LOCK)

    def release(self) -> None:
        self._lock.release()


def take_worker_folder(root: Path) -> WorkerFolder:
    """Lock the first numbered folder under `root` that no process holds.

    Raises:
        OSError: it cannot be created or written.
    """
    for number in count():
        try:
            return WorkerFolder(root / str(number))
        except SpoolInUse:
            continue
    raise AssertionError("unreachable: count() has no end")
