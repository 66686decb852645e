"""Keep the workers' states in shared memory: the supervisor writes, the keeper's `/readyz` reads.

The supervisor rewrites the page at each change without waiting for a reader, so that a keeper
that was just started reads the present state.
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
    """Describe one process that the supervisor runs; times are Unix time in seconds."""

    name: str
    state: State
    since: float
    # How often it was started again after it ended unasked.
    restarts: int
    # How it last ended: its exit status, or the negative number of the signal that ended it.
    last_exit: int | None = None


class Board:
    """Keep the page of states; writer and reader share its descriptor."""

    def __init__(self, page: int) -> None:
        """Store the descriptor `page` of an existing page."""
        self.page = page

    @classmethod
    def new(cls) -> "Board":
        """Create an empty page."""
        return cls(make_block("pawl-board"))

    def write(self, states: list[ProcessState]) -> None:
        """Replace the states on the page.

        Raises:
            OSError: the machine has no memory left.
        """
        encoded = msgspec.json.encode(states)
        os.pwrite(self.page, _HEAD.pack(len(encoded), zlib.crc32(encoded)) + encoded, 0)

    def read(self) -> list[ProcessState]:
        """Return the states on the page; an empty list before the first `write`.

        Raises:
            BlockingIOError: the page was half written at each of `TRIES` looks.
        """
        for _ in range(TRIES):
            data = os.pread(self.page, os.fstat(self.page).st_size, 0)
            if not data:
                return []
            length, checksum = _HEAD.unpack_from(data)
            encoded = data[_HEAD.size : _HEAD.size + length]
            if zlib.crc32(encoded) == checksum:
                return msgspec.json.decode(encoded, type=list[ProcessState])
            # The supervisor was writing it at that moment.
            time.sleep(0.001)
        raise BlockingIOError(
            f"the supervisor's page of process states was half written at each of {TRIES} looks"
        )


def readiness(states: list[ProcessState] | None) -> tuple[bool, list[dict[str, object]]]:
    """Return whether a worker takes calls, and each worker's state for `/readyz`.

    `states` is None if no supervisor runs the workers: they are then taken to be up.
    """
    if states is None:
        return True, []
    workers: list[dict[str, object]] = [
        {
            "name": one.name,
            "state": one.state,
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.since)),
            "restarts": one.restarts,
            "last_exit": one.last_exit,
        }
        for one in states
    ]
    return any(one.state == "up" for one in states), workers
