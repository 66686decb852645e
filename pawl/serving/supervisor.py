"""`pawl proxy`: one keeper and N workers on one port, kept up.

The sockets are the supervisor's: while a worker is replaced, connections wait in its queue.
SIGTERM and SIGINT end all of it, calls under way first, within `PAWL_STOP_GRACE_S`; SIGHUP replaces
the workers one after another, new code and settings included, without a failed request.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

import structlog

from pawl.serving.process import Child, NotReplaced
from proxy.counting.board import Board
from proxy.counting.memory import make_block
from proxy.errors import BadUpstreams, DoesNotStart
from proxy.outdated import outdated
from proxy.settings import ProxySettings
from proxy.upstreams.members import check_upstreams
from store.settings import address

log = structlog.get_logger()

BACKLOG: Final = 4096


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

    What could not work when it is first started is raised. A process that was up once is kept up
    for ever, whatever happens to it.

    Raises:
        OSError: a port is taken.
        BadUpstreams: the file of upstreams cannot be used.
        DoesNotStart: a process never came up, or would not run what its sources say.
    """
    _check(settings)
    stop, replace = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    loop.add_signal_handler(signal.SIGHUP, replace.set)
    listeners = listening(settings.listen, settings.workers)
    fleet = Fleet(settings, listeners)
    try:
        await fleet.start()
        log.info("proxy_up", listen=settings.listen, workers=len(fleet.workers))
        await _until_stopped(settings, fleet, stop, replace)
    finally:
        # Refused from now on: in the queue of a socket that nobody accepts from they would hang.
        for listener in listeners:
            listener.close()
        await fleet.stop()
        log.info("proxy_down")


class Fleet:
    """The keeper and the workers, and what they share."""

    def __init__(self, settings: ProxySettings, listeners: Sequence[socket.socket]) -> None:
        self.gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._board = Board.new()
        # While workers are replaced one after another there is one more of them; the keeper
        # counts too. One is spare.
        blocks = [make_block(f"pawl-counters-{number}") for number in range(len(listeners) + 3)]
        counters = ["--counters", *map(str, blocks)]
        run = [sys.executable, "-m", "pawl.serving.child"]
        # The keeper does not get the sockets: who holds one holds the port, accepting or not.
        keeper = [*run, "keeper", *counters, "--board", str(self._board.page)]
        self.keeper = Child(
            "keeper",
            keeper,
            (*blocks, self._board.page),
            self._tell,
            self.gave_up,
            stop_s=settings.keeper_ends_s,
        )
        self.workers = [
            Child(
                f"worker {number}",
                [*run, "worker", *counters, "--listener", str(fd)],
                (*blocks, fd),
                self._tell,
                self.gave_up,
                stop_s=settings.workers_end_s,
            )
            for number, fd in enumerate(listener.fileno() for listener in listeners)
        ]

    async def start(self) -> None:
        """Start all of them, the keeper first."""
        self._tell()
        for child in (self.keeper, *self.workers):
            await child.start()

    async def replace(self) -> None:
        """Replace the workers one after another; the rest stay where one cannot be replaced.

        Raises:
            NotReplaced: a new one did not come up.
            OSError: this machine starts no process now.
        """
        for worker in self.workers:
            await worker.replace()

    async def stop(self) -> None:
        """Let them finish their work and end."""
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        # Last, so that it stores what the workers still wrote.
        await self.keeper.stop()

    def _tell(self) -> None:
        """Show the keeper how the workers are."""
        try:
            self._board.write([worker.state for worker in self.workers])
        except OSError as error:
            log.error("readiness_not_told", reason=str(error))


async def _until_stopped(
    settings: ProxySettings, fleet: Fleet, stop: asyncio.Event, replace: asyncio.Event
) -> None:
    stopping = asyncio.create_task(stop.wait())
    replacing = asyncio.create_task(_replace_each_time(settings, fleet, replace))
    ends: set[asyncio.Future[Any]] = {stopping, fleet.gave_up}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    replacing.cancel()
    await asyncio.wait([replacing])
    if fleet.gave_up.done():
        fleet.gave_up.result()


async def _replace_each_time(settings: ProxySettings, fleet: Fleet, replace: asyncio.Event) -> None:
    """Replace the workers whenever it is asked for; whatever goes wrong, the present ones serve."""
    while True:
        await replace.wait()
        replace.clear()
        try:
            _check(settings)
            await fleet.replace()
        except (BadUpstreams, DoesNotStart, NotReplaced) as error:
            log.error("workers_not_replaced", reason=error.message)
        except Exception:
            log.exception("workers_not_replaced")
        else:
            log.info("workers_replaced", workers=len(fleet.workers))


def _check(settings: ProxySettings) -> None:
    """Whether processes that are started now can work, and run what their sources say."""
    check_upstreams(settings)
    if changed := outdated():
        named = ", ".join(path.name for path in changed)
        raise DoesNotStart(f"changed after it was compiled: {named}. `make install` compiles it")
