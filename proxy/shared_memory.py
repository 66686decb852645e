"""Share metrics, the workers' states and pinned versions among the processes of one proxy.

The supervisor makes a folder of files in memory, and passes it to every process. Each process that
counts holds a numbered slot in it, whose files are prometheus_client's (its multiprocess mode). The
next process that takes the slot continues its counts, so the number of files is bounded by the
number of processes that run at once, however often they are started again.
"""

import os
import shutil
import tempfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from proxy.errors import SpoolInUse
from proxy.spool.folders import Lock, is_held, lock_file

log = structlog.get_logger()

MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "pawl-proxy-"
OWNER_LOCK: Final = "supervisor.lock"
STATES_FILE: Final = "states.json"
PINS_FILE: Final = "pins"
# The variable in which prometheus_client looks for the folder.
FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
# Bytes reserved for each kind of file; a series takes about 250. Without memory for a mapped page,
# writing to it would kill the process.
FILE_BYTES: Final = {
    **dict.fromkeys(("counter", "histogram"), 2**20),
    **dict.fromkeys(("gauge_sum", "gauge_livesum", "gauge_livemax", "gauge_livemostrecent"), 2**16),
}


class SharedFolder:
    """The shared folder, which only the supervisor makes and removes."""

    def __init__(self) -> None:
        """Make an empty folder; remove the folders that killed supervisors left behind.

        Raises:
            OSError: neither memory nor the disk for temporary files has room.
        """
        parent = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        # Renamed only once it is locked: an unlocked folder would look abandoned to other proxies.
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
        self._owner: Lock = lock_file(made / OWNER_LOCK)
        self.path = made.rename(parent / made.name.removeprefix("."))

    def remove(self) -> None:
        """Remove the folder after all processes have ended."""
        self._owner.release()
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        # The folder may be another user's, or be removed at this moment.
        with suppress(OSError):
            if (folder / OWNER_LOCK).exists() and not any(map(is_held, folder.glob("*.lock"))):
                shutil.rmtree(folder)


def share_metrics_in(folder: Path) -> None:
    """Keep this process's metrics in `folder`; call this before any metric is made.

    If the folder has no room for them, log that and keep them in this process only.
    """
    try:
        slot = _take_slot(folder)
    except OSError as error:
        log.error("counts_alone", reason=str(error))
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: slot)  # type: ignore[no-untyped-call]


def _take_slot(folder: Path) -> int:
    for slot in count():
        with suppress(SpoolInUse):
            # Held until this process ends.
            lock_file(folder / f"{slot}.lock")
            break
    _forget_gauges(folder, slot)
    for kind, room in FILE_BYTES.items():
        file = os.open(folder / f"{kind}_{slot}.db", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, room)
        finally:
            os.close(file)
    return slot


def _forget_gauges(folder: Path, slot: int) -> None:
    """Remove the live gauges of the process that had `slot` and has ended."""
    mark_process_dead(slot, str(folder))  # type: ignore[no-untyped-call]


def is_shared() -> bool:
    """Return whether this process's metrics are in a shared folder."""
    return FOLDER_VARIABLE in os.environ


def registry() -> CollectorRegistry:
    """Return the metrics of all processes that share the folder, or of this one if it shares none.

    Counters, histograms and gauges of mode `sum` include those of processes that have ended.
    """
    if not is_shared():
        return REGISTRY
    folder = Path(os.environ[FOLDER_VARIABLE])
    for path in folder.glob("[0-9]*.lock"):
        # Held meanwhile, so that no process that starts takes the slot.
        with suppress(SpoolInUse):
            lock = lock_file(path)
            _forget_gauges(folder, int(path.stem))
            lock.release()
    together = CollectorRegistry()
    MultiProcessCollector(together, str(folder))  # type: ignore[no-untyped-call]
    return together


State = Literal["starting", "up", "restarting", "stopping"]


class ProcessState(msgspec.Struct, frozen=True):
    """The state of one process that the supervisor runs; times are Unix time in seconds."""

    name: str
    state: State
    since: float
    # How often it was started again after it had ended by itself.
    restarts: int
    # How it last ended: its exit status, or the negative number of the signal that ended it.
    last_exit: int | None = None


def write_states(folder: Path, states: list[ProcessState]) -> None:
    """Write the workers' states, from which the ingester answers `/readyz`, over the old ones.

    Raises:
        OSError: memory has no room.
    """
    partial = folder / f"{STATES_FILE}.part"
    partial.write_bytes(msgspec.json.encode(states))
    partial.replace(folder / STATES_FILE)


def read_states(folder: Path) -> list[ProcessState]:
    return msgspec.json.decode((folder / STATES_FILE).read_bytes(), type=list[ProcessState])


def readiness(states: list[ProcessState] | None) -> tuple[bool, list[dict[str, object]]]:
    """Return whether a worker takes calls, and each worker's state for `/readyz`.

    `states` is None if no supervisor runs the workers: they are then assumed to be up.
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
