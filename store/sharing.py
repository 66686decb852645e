"""File locks between processes: taking turns, and being counted among the users of something.

The kernel gives a lock back when the process that holds it is gone, however it went, so that a
killed process never leaves anything locked. Locks are not handed down to child processes.
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
    """A lock on a file, held until `release` or until the process is gone."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def release(self) -> None:
        """Give the lock back."""
        os.close(self._handle)


def try_to_hold(path: Path, *, shared: bool = False) -> Hold | None:
    """Lock `path` at once; None where somebody else's lock is in the way.

    Raises:
        OSError: the file cannot be opened or made.
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
    """A limited wait: it ends with an error when its time is over or nobody wants it any more."""

    def __init__(self, within_s: float, unwanted: Callable[[], bool]) -> None:
        self._deadline = time.monotonic() + within_s
        self._within_s = within_s
        self._unwanted = unwanted

    @property
    def left_s(self) -> float:
        """Say how many seconds are left of it."""
        return max(0.0, self._deadline - time.monotonic())

    def go_on(self, what: str) -> None:
        """Let a moment pass; `what` completes "gave up waiting for".

        Raises:
            StoreError: the time is over, or the wait is not wanted any more.
        """
        if self._unwanted():
            raise StoreError(f"stopped waiting for {what}: told to stop")
        if self.left_s == 0:
            raise StoreError(f"gave up waiting for {what} after {self._within_s:g} s")
        time.sleep(POLL_S)


def take_turn(path: Path, wait: Wait, what: str) -> Hold:
    """Lock `path` for oneself, after whoever holds it.

    Raises:
        StoreError: it was not to be had in time.
        OSError: the file cannot be opened or made.
    """
    while (held := try_to_hold(path)) is None:
        wait.go_on(what)
    return held
