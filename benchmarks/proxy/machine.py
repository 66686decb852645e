"""Hold processes to a core, and measure what they take of CPU and memory."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

# What is measured has this core to itself; the load and the model server share the other.
MEASURED_CORE: Final = 0
LOAD_CORE: Final = 1
MIB: Final = 2**20
STOP_TIMEOUT_S: Final = 30.0
READY_TIMEOUT_S: Final = 120.0


class NotUp(Exception):
    """Report that a process did not come up; the message ends with its log's last lines."""


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run what is started inside the block, and its children, on this core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def running(
    command: Sequence[str], core: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process on one core, its output in a file, and end it when the block is left."""
    with log.open("ab") as output, on_core(core):
        process = subprocess.Popen(
            command, env=dict(os.environ) | dict(environment or {}), stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_lines(log: Path, count: int = 20) -> str:
    """Return the end of a log, for a message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


class Watch:
    """Measure CPU and memory of process trees.

    `roots` names each tree's first process. Of the tree called `proxy`, the processes that
    listen on `port` are told apart as `serving`; what else it has is `beside`.
    """

    def __init__(self, roots: Mapping[str, int], port: int) -> None:
        self._roots = roots
        self._serving: set[int] = set()
        for process in self._tree("proxy"):
            listening = (
                at.laddr.port for at in process.net_connections("tcp") if at.status == "LISTEN"
            )
            if port in listening:
                self._serving.add(process.pid)

    def cpu_seconds(self) -> dict[str, float]:
        """Return what was used so far, by group; children that ended count for their parent."""
        return self._sum(lambda process: sum(process.cpu_times()[:4]))

    def memory_mib(self) -> dict[str, float]:
        """Return what is resident now, shared pages counted once (proportional set size)."""
        return self._sum(lambda process: process.memory_full_info().pss / MIB)

    def _sum(self, of: Callable[[psutil.Process], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in self._roots:
            for process in self._tree(name):
                group = self._group(name, process.pid)
                # It may end while we look: its parent has its time then.
                with suppress(psutil.NoSuchProcess):
                    found[group] = found.get(group, 0.0) + of(process)
        return found

    def _tree(self, name: str) -> list[psutil.Process]:
        if name not in self._roots:
            return []
        root = psutil.Process(self._roots[name])
        return [root, *root.children(recursive=True)]

    def _group(self, name: str, pid: int) -> str:
        if name != "proxy":
            return name
        return "serving" if pid in self._serving else "beside"


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `ready`.

    Raises:
        NotUp: the process ended, or is not ready after two minutes.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = last_lines(log)
            raise NotUp(f"it did not come up: {tail.rpartition(chr(10))[2]}\n{tail}")
        time.sleep(0.1)


def busy_share(seconds: float = 1.0) -> float:
    """Return how much of all cores is in use by others now, 0 to 1."""
    return psutil.cpu_percent(seconds) / 100
