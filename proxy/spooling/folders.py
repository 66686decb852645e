"""The folders of a spool: each is held by one process, by a lock that ends with it."""

import errno
import fcntl
import os
from itertools import count
from pathlib import Path
from typing import Final

from proxy.errors import SpoolInUse

# Records hold prompts and replies: they are for the proxy's own user.
PRIVATE: Final = 0o700
OPEN: Final = ".open"
SEALED: Final = ".seg"
# What a disk says that may work again by itself; anything else is a mistake in the set-up.
PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE})


class Lock:
    """A file that this process holds for as long as it lives, or until `release`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def release(self) -> None:
        """Let go."""
        os.close(self._handle)


def hold(path: Path) -> Lock:
    """Lock a file.

    Raises:
        SpoolInUse: another process holds it.
        OSError: it cannot be made, or not be locked.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise SpoolInUse(
            f"another process spools to {path.parent}: stop it, or set PAWL_SPOOL_DIR"
        ) from error
    except OSError:
        os.close(handle)
        raise
    return Lock(handle)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock."""
    try:
        hold(path).release()
    except SpoolInUse:
        return True
    return False


class Home:
    """A worker's own folder."""

    def __init__(self, folder: Path) -> None:
        """Take hold of `folder`.

        Raises:
            SpoolInUse: another process holds it.
            OSError: it cannot be made or written.
        """
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        self.folder = folder
        self._lock = hold(folder / "lock")
        try:
            # What a worker before this one left open: nobody writes to it any more.
            self.left = sorted(folder.glob(f"*{OPEN}"))
        except OSError:
            self._lock.release()
            raise

    def release(self) -> None:
        """Let another process have it."""
        self._lock.release()


def take_home(root: Path) -> Home:
    """Take the first numbered folder under `root` that nobody holds.

    Raises:
        OSError: it cannot be made or written.
    """
    for number in count():
        try:
            return Home(root / str(number))
        except SpoolInUse:
            continue
    raise AssertionError("unreachable: count() has no end")
