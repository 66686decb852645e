"""Lock files between processes: exclusively to take turns, shared to count users.

The kernel releases a lock (flock(2)) when the process that holds it ends, however it ends, so that
a killed process never leaves anything locked. Child processes do not inherit locks, because Python
opens files non-inheritable (PEP 446).
"""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from store.errors import StoreError

POLL_S: Final = 0.05


class Hold:
    """Hold the lock on a file until `release`, or until the process ends."""

    def __init__(self, handle: int) -> None:
        """Store the descriptor of the open, locked file."""
        self._handle = handle

    def release(self) -> None:
        """Release the lock by closing the file."""
        os.close(self._handle)


def try_to_hold(path: Path, *, shared: bool = False) -> Hold | None:
    """Lock `path` without waiting; return None if another lock is in the way.

    A shared lock can be held by many at once, an exclusive one only alone.

    Raises:
        OSError: the file cannot be opened or created.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return Hold(handle)


class Wait:
    """Limit a wait: raise an error when its time is over or it is cancelled."""

    def __init__(self, within_s: float, unwanted: Callable[[], bool]) -> None:
        """Start a wait of `within_s` seconds, which is cancelled once `unwanted` returns True."""
        self._deadline = time.monotonic() + within_s
        self._within_s = within_s
        self._unwanted = unwanted

    @property
    def left_s(self) -> float:
        """Return how many seconds are left."""
        return max(0.0, self._deadline - time.monotonic())

    def go_on(self, what: str) -> None:
        """Sleep for `POLL_S` seconds; `what` completes "gave up waiting for".

        Raises:
            StoreError: the time is over, or the wait was cancelled.
        """
        if self._unwanted():
            raise StoreError(f"stopped waiting for {what}: told to stop")
        if self.left_s == 0:
            raise StoreError(f"gave up waiting for {what} after {self._within_s:g} s")
        time.sleep(POLL_S)


def take_turn(path: Path, wait: Wait, what: str) -> Hold:
    """Wait for an exclusive lock on `path`, and take it; `what` is as in `Wait.go_on`.

    Raises:
        StoreError: it was not free in time, or the wait was cancelled.
        OSError: the file cannot be opened or created.
    """
    while (held := try_to_hold(path)) is None:
        wait.go_on(what)
    return held
