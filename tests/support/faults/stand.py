"""Set up `pawl proxy` with all that it needs: each part can be killed, and its disk can fail."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, Literal

import psutil

from benchmarks.stack import free_port, running
from store.embedded import EmbeddedPostgres
from store.errors import StoreError
from tests.support.faults.load import BROKEN, fetch

Part = Literal["worker", "ingester", "supervisor", "postgres"]
PARTS: Final[tuple[Part, ...]] = ("worker", "ingester", "supervisor", "postgres")
READY_S: Final = 60.0
POLL_S: Final = 0.05
CHUNK_S: Final = 0.005

Fault = Literal["full disk", "I/O errors"]
FAULTS: Final[tuple[Fault, ...]] = ("full disk", "I/O errors")
DISK_MIB: Final = 64
PIECE: Final = 2**16
# What is freed meanwhile (segments that were stored) is taken again so soon.
TOP_UP_S: Final = 0.005


class NotReady(Exception):
    """Report that what was killed did not come back; the message has the proxy's last log lines."""


class CannotInjectFaults(Exception):
    """Report that this machine does not let us; the message says what is missing."""


class Stand:
    """Run a proxy and its PostgreSQL."""

    def __init__(
        self, folder: Path, upstream_url: str, workers: int, disk: "Disk | None" = None
    ) -> None:
        """Start all of it, and return before it is ready.

        Args:
            folder: for the database, the log and the spool.
            upstream_url: the model server's, as `PAWL_UPSTREAM_URL` has it.
            workers: how many of them.
            disk: what the spool lies on, if it can go wrong.
        """
        self.port, self.admin = free_port(), free_port()
        self.workers, self.disk = workers, disk
        self.spool = (folder if disk is None else disk.folder) / "spool"
        self.log = folder / "pawl.log"
        # The last words of each supervisor that ended though nobody had killed it.
        self.ended_by_itself: list[str] = []
        self.postgres = EmbeddedPostgres(folder)
        self.url = self.postgres.ensure_running()
        self.environment = {
            **os.environ,
            "DATABASE_URL": self.url,
            "PAWL_UPSTREAM_URL": upstream_url,
            "PAWL_LISTEN": f"127.0.0.1:{self.port}",
            "PAWL_ADMIN_LISTEN": f"127.0.0.1:{self.admin}",
            "PAWL_SPOOL_DIR": str(self.spool),
            # Tests read the lines of calls.
            "PAWL_LOG_LEVEL": "debug",
            **({} if disk is None else disk.environment),
        }
        self.supervisor = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "pawl.cli", "proxy", "--workers", str(self.workers)]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Return the supervisor's workers, or its ingester; of an empty kind all of them."""
        processes = []
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.supervisor.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if not kind or kind in process.cmdline():
                        processes.append(process)
        return processes

    def connections(self, worker: psutil.Process) -> int:
        """Return how many clients a worker has."""
        return self._sockets(worker, "ESTABLISHED")

    def is_leaving(self, worker: psutil.Process) -> bool:
        """Return whether a worker that still runs takes no new connections."""
        with suppress(psutil.NoSuchProcess):
            return not self._sockets(worker, "LISTEN")
        return False

    def _sockets(self, worker: psutil.Process, status: str) -> int:
        return sum(
            at.laddr.port == self.port and at.status == status for at in worker.net_connections()
        )

    async def kill(self, part: Part, which: int) -> None:
        """Kill one (`kill -9`), of several workers number `which`, and return when all is back.

        Raises:
            NotReady: see there.
        """
        if part == "supervisor":
            self.supervisor.kill()
            self.supervisor.wait()
            await self.restart()
        elif part == "postgres":
            await kill_and_start(self.postgres)
        else:
            victims = self.processes(part)
            await _kill(victims[which % len(victims)])
        await self.ready()

    async def restart(self) -> None:
        """Start the proxy again, as a service manager does: until it has its port."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self.supervisor = self._start()
            while self.supervisor.poll() is None:
                if self.processes("worker"):
                    return
                await asyncio.sleep(POLL_S)
        raise NotReady(self._last_words())

    async def start_postgres(self) -> None:
        await start_again(self.postgres)

    async def ready(self) -> None:
        """Wait until ingester and workers are there and the database is up.

        A supervisor that has ended is noted, and started again: what it did to the calls is to be
        seen, too.

        Raises:
            NotReady: they are not, after a minute.
        """
        deadline = time.monotonic() + READY_S
        while not await self._is_ready():
            if time.monotonic() > deadline:
                raise NotReady(self._last_words())
            if self.supervisor.poll() is not None:
                self.ended_by_itself.append(self._last_words(5))
                await self.restart()
            await asyncio.sleep(POLL_S)

    async def _is_ready(self) -> bool:
        if len(self.processes("worker")) < self.workers or not self.processes("ingester"):
            return False
        try:
            state = json.loads((await fetch(self.admin, "/readyz")).body)
            models = await fetch(self.port, "/v1/models")
        except BROKEN:
            return False
        return state["database"] == "up" and models.status == 200

    def _last_words(self, count: int = 40) -> str:
        """Return the end of the proxy's log, less its lines about calls."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if '"event":"call"' not in line][-count:])

    def stop(self) -> None:
        """Stop it by SIGTERM; what is spooled is stored first, as far as it can be.

        Raises:
            subprocess.TimeoutExpired: it was still there after a minute; then it is killed.
        """
        everything = [psutil.Process(self.supervisor.pid), *self.processes("")]
        self.supervisor.terminate()
        try:
            self.supervisor.wait(READY_S)
        except subprocess.TimeoutExpired:
            for process in everything:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.supervisor.wait()
            raise


@asynccontextmanager
async def running_stand(
    folder: Path, upstream_url: str, workers: int, *, ready: bool = True
) -> AsyncIterator[Stand]:
    """Bring it up before a model server that runs, and down after the block."""
    stand = await asyncio.to_thread(Stand, folder, upstream_url, workers)
    try:
        if ready:
            await stand.ready()
        yield stand
    finally:
        if stand.supervisor.poll() is None:
            await asyncio.to_thread(stand.stop)
        await asyncio.to_thread(stand.postgres.stop)


@contextmanager
def standing(folder: Path, workers: int, *, faults: bool = False) -> Iterator[Stand]:
    """Bring everything up, and down after the block; `faults` lets the spool's disk go wrong.

    Raises:
        CannotInjectFaults: the disk cannot be mounted here, or there is no C compiler.
    """
    port, log = free_port(), folder / "upstream.log"
    command = [sys.executable, "-m", "benchmarks.upstream", str(port), str(CHUNK_S)]
    disk = small_disk(folder / "disk", folder) if faults else nullcontext()
    with disk as own, running(command, log, {}, max(os.sched_getaffinity(0))):
        stand = Stand(folder, f"http://127.0.0.1:{port}/v1", workers, own)
        try:
            yield stand
        finally:
            if stand.supervisor.poll() is None:
                stand.stop()
            stand.postgres.stop()


async def kill_and_start(postgres: EmbeddedPostgres) -> None:
    """Kill PostgreSQL, and start it again."""
    assert postgres.pid is not None
    await _kill(psutil.Process(postgres.pid))
    await start_again(postgres)


async def start_again(postgres: EmbeddedPostgres) -> None:
    """Start PostgreSQL; for `READY_S`, try again while a killed server's rest is in the way."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            await asyncio.to_thread(postgres.ensure_running)
        except (StoreError, OSError, RuntimeError, AssertionError):
            # The last is pgserver's word for one that is up and still recovers.
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
        else:
            return


async def _kill(process: psutil.Process) -> None:
    """Kill it (`kill -9`), and wait until it is reaped: before that it is still listed."""
    process.kill()
    await asyncio.to_thread(psutil.wait_procs, [process], READY_S)


class Disk:
    """Keep a folder on a filesystem of its own, and make it go wrong."""

    def __init__(self, folder: Path, beside: Path) -> None:
        """Set up in `beside`, a folder on another disk, what makes the errors."""
        self.folder = folder
        self._balloon = folder / "balloon"
        self._switch = beside / "io-errors"
        self._library = _compiled(beside)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return what a process needs so that its I/O on this disk can fail."""
        return {
            "LD_PRELOAD": str(self._library),
            "CHAOS_FOLDER": str(self.folder.resolve()),
            "CHAOS_SWITCH": str(self._switch),
        }

    async def suffer(self, fault: Fault, seconds: float) -> None:
        """Let the disk fail for `seconds`; after that it is as before."""
        if fault == "I/O errors":
            self._switch.touch()
            await asyncio.sleep(seconds)
            self._switch.unlink()
            return
        over = time.monotonic() + seconds
        balloon = os.open(self._balloon, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            while time.monotonic() < over:
                _write_until_full(balloon)
                await asyncio.sleep(TOP_UP_S)
        finally:
            os.close(balloon)
            self._balloon.unlink()


def _write_until_full(handle: int) -> None:
    size = PIECE
    while size:
        try:
            os.write(handle, bytes(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # To the last byte: a small record must not find room where a large piece does not.
            size //= 2


def _compiled(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CannotInjectFaults(
            "I/O errors are made by a small library, and there is no C compiler to make it with: "
            "install gcc, or leave the faults out with --plain"
        )
    library, source = folder / "io_errors.so", Path(__file__).with_name("io_errors.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


@contextmanager
def small_disk(folder: Path, beside: Path) -> Iterator[Disk]:
    """Mount a small filesystem there; it is gone when the block is left.

    Raises:
        CannotInjectFaults: it cannot be mounted here, or there is no C compiler.
    """
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "pawl-chaos", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        raise CannotInjectFaults(
            f"a disk that fills is a tmpfs of {DISK_MIB} MiB, and it cannot be mounted here "
            f"({mounted.stderr.strip()}): run as root, or leave the faults out with --plain"
        )
    try:
        yield Disk(folder, beside)
    finally:
        # What is killed may hold it for a moment longer: it goes with its last user.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
