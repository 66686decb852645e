"""`pawl proxy`: one keeper and N workers on one port, kept up.

The sockets are the supervisor's: while a worker is replaced, connections wait in its queue.
SIGTERM and SIGINT end all of it, calls under way first, within `PAWL_STOP_GRACE_S`; SIGHUP replaces
the workers one after another, new code and settings included, without a failed request.
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog
from prometheus_client.multiprocess import mark_process_dead

from pawl.serving.ending import LEAVE, LEAVE_MARGIN_S, LEAVE_S, STOP, end
from proxy.errors import BadUpstreams, DoesNotStart
from proxy.outdated import outdated
from proxy.settings import ProxySettings
from proxy.upstreams.members import check_upstreams
from store.settings import address

log = structlog.get_logger()

METRICS_DIR: Final = "metrics"
BACKLOG: Final = 4096
RESTART_S: Final = 0.2
# A process that ends so soon after its start did not fail at its work.
YOUNG_S: Final = 5.0
MOST_EARLY_ENDS: Final = 5


class Child:
    """One process, started again whenever it ends by itself."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        fds: Sequence[int],
        *,
        stop_s: float,
    ) -> None:
        self.name = name
        self._stop_s = stop_s
        self._command = command
        self._environment = environment
        self._fds = fds
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._leaving: asyncio.subprocess.Process | None = None
        self._early_ends = 0
        self.stopping = False

    async def start(self) -> None:
        """Start it, and watch it from now on."""
        await self._spawn()
        self._watching = asyncio.create_task(self._watch(), name=f"pawl-watch-{self.name}")

    async def _spawn(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            pass_fds=self._fds,
            # It ends with us, however we end: its standard input closes then.
            stdin=asyncio.subprocess.PIPE,
        )
        log.info("child_started", child=self.name, pid=self._process.pid)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._process is not None:
            started = loop.time()
            status = await self._process.wait()
            mark_process_dead(self._process.pid, self._environment["PROMETHEUS_MULTIPROC_DIR"])  # type: ignore[no-untyped-call]
            if self.stopping:
                return
            log.error("child_ended", child=self.name, status=status)
            # One that somebody killed (the kernel, for its memory) did not fail to start.
            young = status != -signal.SIGKILL and loop.time() - started < YOUNG_S
            self._early_ends = self._early_ends + 1 if young else 0
            if self._early_ends >= MOST_EARLY_ENDS:
                raise DoesNotStart(f"{self.name} ends as soon as it is started; see its log above")
            await asyncio.sleep(RESTART_S)
            await self._spawn()

    async def replace(self) -> None:
        """Start another one, then let the present one finish its work and end."""
        old, watching = self._process, self._watching
        if watching is not None:
            watching.cancel()
        await self.start()
        if old is not None:
            self._leaving = old
            await self._end(old, LEAVE, LEAVE_S + LEAVE_MARGIN_S)
            self._leaving = None

    async def stop(self) -> None:
        """Let it finish its work and end, and one that is being replaced; both have their time."""
        self.stopping = True
        present = (self._process, self._leaving)
        await asyncio.gather(
            *(self._end(process, STOP, self._stop_s) for process in present if process is not None)
        )

    async def _end(
        self, process: asyncio.subprocess.Process, how: signal.Signals, within_s: float
    ) -> None:
        await end(process, self.name, how, within_s)
        mark_process_dead(process.pid, self._environment["PROMETHEUS_MULTIPROC_DIR"])  # type: ignore[no-untyped-call]

    @property
    def watching(self) -> asyncio.Task[None]:
        """Ends with `DoesNotStart` if it cannot be kept up."""
        assert self._watching is not None
        return self._watching


def listening(listen: str, count: int) -> list[socket.socket]:
    """The data port's sockets, one a worker: the kernel spreads connections over them.

    On one socket whoever wakes first takes all that wait. They are ours to the end: a worker
    that is replaced leaves its socket, and who waits there, to the next one.

    Raises:
        OSError: the port is taken.
    """
    host, port = address(listen)
    # Sockets that share a port share it with anybody who asks: see that nobody has it.
    _bound(host, port, shared=False).close()
    listeners = [_bound(host, port, shared=True) for _ in range(count)]
    for listener in listeners:
        listener.listen(BACKLOG)
        listener.setblocking(False)
        listener.set_inheritable(True)
    return listeners


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


async def serve(settings: ProxySettings) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        OSError: a port is taken.
        BadUpstreams: the file of upstreams cannot be used.
        DoesNotStart: a process cannot be kept up, or would not run what its sources say.
    """
    _check(settings)
    stop, replace = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    loop.add_signal_handler(signal.SIGHUP, replace.set)
    listeners = listening(settings.listen, settings.workers)
    children = _children(settings, listeners)
    keeper, workers = children[0], children[1:]
    try:
        for child in children:
            await child.start()
        log.info("proxy_up", listen=settings.listen, workers=len(workers))
        await _until_stopped(settings, children, stop, replace)
    finally:
        # Refused from now on: in the queue of a socket that nobody accepts from they would hang.
        for listener in listeners:
            listener.close()
        await asyncio.gather(*(worker.stop() for worker in workers))
        # Last, so that it stores what the workers still wrote.
        await keeper.stop()
        log.info("proxy_down")


async def _until_stopped(
    settings: ProxySettings,
    children: list[Child],
    stop: asyncio.Event,
    replace: asyncio.Event,
) -> None:
    stopping = asyncio.create_task(stop.wait())
    replacing = asyncio.create_task(_replace_once(settings, children[1:], replace))
    while not stopping.done():
        # That of a process which is being replaced is cancelled, and watches nothing any more.
        watched = {child.watching for child in children if not child.watching.cancelled()}
        await asyncio.wait({stopping, replacing, *watched}, return_when=asyncio.FIRST_COMPLETED)
        for task in (replacing, *watched):
            if task.done() and not task.cancelled():
                task.result()
        if replacing.done():
            replacing = asyncio.create_task(_replace_once(settings, children[1:], replace))
    replacing.cancel()


async def _replace_once(
    settings: ProxySettings, workers: list[Child], replace: asyncio.Event
) -> None:
    """One after another; none where the new ones could not start."""
    await replace.wait()
    replace.clear()
    try:
        _check(settings)
    except (BadUpstreams, DoesNotStart) as error:
        log.error("workers_not_replaced", reason=error.message)
        return
    for worker in workers:
        await worker.replace()
    log.info("workers_replaced", workers=len(workers))


def _check(settings: ProxySettings) -> None:
    """Whether processes that are started now can work, and run what their sources say."""
    check_upstreams(settings)
    if changed := outdated():
        named = ", ".join(path.name for path in changed)
        raise DoesNotStart(f"changed after it was compiled: {named}. `make install` compiles it")


def _children(settings: ProxySettings, listeners: list[socket.socket]) -> list[Child]:
    """The keeper first."""
    metrics = settings.spool_dir / METRICS_DIR
    environment = dict(os.environ) | {"PROMETHEUS_MULTIPROC_DIR": str(_emptied(metrics).resolve())}
    # The keeper does not get it: who holds it, holds the port, whether he accepts or not.
    run = [sys.executable, "-m", "pawl.serving.child"]
    keeper = Child("keeper", [*run, "keeper"], environment, (), stop_s=settings.keeper_ends_s)
    stop_s = settings.workers_end_s
    workers = [
        Child(f"worker {number}", [*run, "worker", str(fd)], environment, (fd,), stop_s=stop_s)
        for number, fd in enumerate(listener.fileno() for listener in listeners)
    ]
    return [keeper, *workers]


def _emptied(folder: Path) -> Path:
    """Counters begin at 0 with the proxy, as Prometheus expects of a process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
