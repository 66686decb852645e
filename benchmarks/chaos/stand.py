"""Set up a model server, PostgreSQL, and `pawl proxy`, each of which can be killed."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, Literal

import psutil

from benchmarks.chaos.faults import Disk, small_disk
from benchmarks.chaos.load import BROKEN, fetch
from benchmarks.chaos.postgres import kill, kill_and_start, start_again
from benchmarks.proxy.machine import running
from benchmarks.stack import free_port
from store.embedded import EmbeddedPostgres

Part = Literal["worker", "ingester", "supervisor", "postgres"]
PARTS: Final[tuple[Part, ...]] = ("worker", "ingester", "supervisor", "postgres")
READY_S: Final = 60.0
POLL_S: Final = 0.05


class NotReady(Exception):
    """Report that what was killed did not come back; the message has the proxy's last log lines."""


class Stand:
    """Run a proxy and what it needs."""

    def __init__(
        self,
        folder: Path,
        upstream_port: int,
        workers: int,
        disk: Disk | None = None,
    ) -> None:
        """Start all of it, and return before it is ready.

        Args:
            folder: for the database, the log and the spool.
            upstream_port: the model server's.
            workers: how many of them.
            disk: what the spool lies on, if it can go wrong.
        """
        self.port, self.admin = free_port(), free_port()
        self.workers = workers
        self.disk = disk
        self.spool = folder / "spool" if disk is None else disk.folder / "spool"
        # The last words of each supervisor that ended though nobody had killed it.
        self.ended_by_itself: list[str] = []
        self.postgres = EmbeddedPostgres(folder)
        self.url = self.postgres.ensure_running()
        self.log = folder / "pawl.log"
        self._program = [sys.executable, "-m", "pawl.cli"]
        self._environment = dict(os.environ) | {
            "DATABASE_URL": self.url,
            "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream_port}/v1",
            "PAWL_LISTEN": f"127.0.0.1:{self.port}",
            "PAWL_ADMIN_LISTEN": f"127.0.0.1:{self.admin}",
            "PAWL_SPOOL_DIR": str(self.spool),
        }
        if disk is not None:
            self._environment |= disk.environment
        self.supervisor = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [*self._program, "proxy", "--workers", str(self.workers)]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Return the supervisor's workers, or its ingester; of an empty kind all of them."""
        found = []
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.supervisor.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if not kind or kind in process.cmdline():
                        found.append(process)
        return found

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
            await kill(victims[which % len(victims)])
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
        """Start it again."""
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
            said = json.loads((await fetch(self.admin, "/readyz")).body)
            models = await fetch(self.port, "/v1/models")
        except BROKEN:
            return False
        return said["database"] == "up" and models.status == 200

    def _last_words(self, count: int = 40) -> str:
        """Return the end of the proxy's log, less its lines about calls."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if '"event":"call"' not in line][-count:])

    def stop(self) -> None:
        """Stop it by SIGTERM; what is spooled is stored first, as far as it can be.

        Raises:
            subprocess.TimeoutExpired: it did not end; all of it is killed.
        """
        everything = self.processes("")
        with suppress(psutil.NoSuchProcess):
            everything.append(psutil.Process(self.supervisor.pid))
        self.supervisor.terminate()
        try:
            self.supervisor.wait(READY_S)
        except subprocess.TimeoutExpired:
            for process in everything:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.supervisor.wait()
            raise


@contextmanager
def standing(folder: Path, workers: int, *, faults: bool = False) -> Iterator[Stand]:
    """Bring everything up, and down after the block; `faults` lets the spool's disk go wrong.

    Raises:
        CannotInjectFaults: see `benchmarks.chaos.faults`.
    """
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.chaos.upstream", str(port)]
    log = folder / "upstream.log"
    disk = small_disk(folder / "disk", folder) if faults else nullcontext()
    with disk as own, running(command, max(os.sched_getaffinity(0)), log):
        stand = Stand(folder, port, workers, own)
        try:
            yield stand
        finally:
            if stand.supervisor.poll() is None:
                stand.stop()
            stand.postgres.stop()
