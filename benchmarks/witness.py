"""Watch how long a machine itself stalls, beside what is measured on it.

A shared machine takes its processors away, or lets a disk wait, for a tenth of a second and more. A
process that asks for next to nothing sees that as well: it sleeps for a few milliseconds and makes
a few bytes durable, again and again. A latency above its longest stall is the program's own.
"""

import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

SLEEP_S: Final = 0.005
RECORD: Final = bytes(300)


class Witness:
    """Find the longest stall of the machine and of the disk that holds `folder`.

    Attributes:
        longest_s: the longest stall in seconds, once it has ended.
    """

    def __init__(self, folder: Path) -> None:
        """Begin with no stall; `folder` is on the disk to watch."""
        self.longest_s = 0.0
        context = get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_watch, args=(there, str(folder / "witness")))

    def __enter__(self) -> "Witness":
        """Watch from now on."""
        self._process.start()
        self._here.recv()
        return self

    def __exit__(self, *_: object) -> None:
        """Note the longest stall."""
        self._here.send(None)
        self.longest_s = self._here.recv()
        self._process.join()


def _watch(there: Connection, file: str) -> None:
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY, 0o600)
    longest_s = 0.0
    there.send(None)
    ended = False
    while not ended:
        begun = time.perf_counter()
        time.sleep(SLEEP_S)
        os.pwrite(descriptor, RECORD, 0)
        os.fdatasync(descriptor)
        longest_s = max(longest_s, time.perf_counter() - begun - SLEEP_S)
        ended = there.poll()
    os.close(descriptor)
    os.unlink(file)
    there.send(longest_s)
