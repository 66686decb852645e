"""What the supervisor knows of its workers, for the keeper's `/readyz`: a page in shared memory.

The supervisor writes it anew at each change and waits for nobody; a keeper that was just started
reads the present state.
"""

import os
import struct
import time
import zlib
from typing import Final, Literal

import msgspec

from proxy.counting.memory import make_block

State = Literal["starting", "up", "restarting", "stopping"]
TRIES: Final = 100
_HEAD: Final = struct.Struct("<QI")


class ProcessState(msgspec.Struct, frozen=True):
    """One process of the supervisor's; times are seconds since 1970."""

    name: str
    state: State
    since: float
    # How often it was started again after it had ended by itself.
    restarts: int
    # How it ended last: its exit status, or the signal that ended it, negative.
    last_exit: int | None = None


class Board:
    """The page; who writes it and who reads it share one descriptor."""

    def __init__(self, page: int) -> None:
        self.page = page

    @classmethod
    def new(cls) -> "Board":
        """Make an empty page."""
        return cls(make_block("pawl-board"))

    def write(self, states: list[ProcessState]) -> None:
        """Replace what it says.

        Raises:
            OSError: the machine has no memory left.
        """
        said = msgspec.json.encode(states)
        os.pwrite(self.page, _HEAD.pack(len(said), zlib.crc32(said)) + said, 0)

    def read(self) -> list[ProcessState]:
        """Return what it says; nothing where it was not written yet."""
        for _ in range(TRIES):
            data = os.pread(self.page, os.fstat(self.page).st_size, 0)
            if not data:
                return []
            length, checksum = _HEAD.unpack_from(data)
            said = data[_HEAD.size : _HEAD.size + length]
            if zlib.crc32(said) == checksum:
                return msgspec.json.decode(said, type=list[ProcessState])
            # It was being written at that moment.
            time.sleep(0.001)
        raise BlockingIOError("the supervisor's page is never whole")


def readiness(states: list[ProcessState] | None) -> tuple[bool, list[dict[str, object]]]:
    """Say whether calls are taken, and tell of each worker; None: there is no supervisor."""
    if states is None:
        return True, []
    told: list[dict[str, object]] = [
        {
            "name": one.name,
            "state": one.state,
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.since)),
            "restarts": one.restarts,
            "last_exit": one.last_exit,
        }
        for one in states
    ]
    return any(one.state == "up" for one in states), told
