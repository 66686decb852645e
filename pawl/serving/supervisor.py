"""Run one ingester and N workers on one port (`pawl proxy`), and restart those that end.

The supervisor owns the sockets: while a worker is replaced, connections wait in their queues.
SIGTERM and SIGINT end all processes, calls in progress first, within `PAWL_STOP_GRACE_S`; before
that load balancers have `PAWL_DRAIN_DELAY_S` to notice that the proxy is not ready any more. SIGHUP
replaces the workers one after another, with new code and settings and no failed request.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog

from pawl.processes import run_module, stop_event
from pawl.serving.process import Child, NotReplaced
from proxy.errors import BadRedaction, BadUpstreams, DoesNotStart, NoSpans
from proxy.redaction import open_redactor
from proxy.settings import ProxySettings
from proxy.shared_memory import SharedFolder, write_states
from proxy.spool.folders import PASSING_ERRORS
from proxy.upstreams.upstreams import check_upstreams
from store import install_command
from store.admin_port import explain_listen_failure
from store.errors import BadPolicies
from store.policy_table import open_policies
from store.settings import parse_address

log = structlog.get_logger()

BACKLOG: Final = 4096


def open_sockets(listen: str, count: int) -> list[socket.socket]:
    """Open the data port's sockets, one for each of `count` workers.

    The kernel spreads connections over the sockets; on a single socket, the worker that wakes
    first would take all waiting connections. A worker that is replaced leaves its socket, with the
    connections that wait in its queue, to its successor.

    Raises:
        NotListening: the port is taken, or the machine has no such address.
    """
    host, port = parse_address(listen)
    with explain_listen_failure(listen, "PAWL_LISTEN"):
        # With SO_REUSEPORT, binding succeeds on a port that another program shares: check first.
        _bind_socket(host, port, shared=False).close()
        listeners = [_bind_socket(host, port, shared=True) for _ in range(count)]
        for listener in listeners:
            listener.listen(BACKLOG)
    for listener in listeners:
        listener.setblocking(False)
        listener.set_inheritable(True)
    return listeners


def _bind_socket(host: str, port: int, *, shared: bool) -> socket.socket:
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
    """Run ingester and workers until SIGTERM or SIGINT.

    Errors of the first start are raised. A process that was up once is restarted without end.

    Raises:
        NotListening: a port is taken.
        BadUpstreams, BadRedaction: the file of upstreams, or of redaction rules, cannot be used.
        NoSpans: spans are wanted, and cannot be sent.
        BadPolicies: the file of policies cannot be used.
        DoesNotStart: a process never came up, or the spool's folder cannot be made.
    """
    check_files(settings)
    try:
        settings.spool_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # A full or failing disk is waited for.
        if error.errno not in PASSING_ERRORS:
            place = f"PAWL_SPOOL_DIR={settings.spool_dir}"
            why = f"{place} cannot be made: {error.strerror}: set another folder"
            raise DoesNotStart(why) from error
    stop, replace = stop_event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, replace.set)
    listeners = open_sockets(settings.listen, settings.workers)
    fleet = Fleet(settings, listeners)
    try:
        await fleet.start()
        log.info("proxy_up", listen=settings.listen, workers=len(fleet.workers))
        await _until_stopped(settings, fleet, stop, replace)
        if settings.drain_delay_s:
            await fleet.announce_stop(settings.drain_delay_s)
    finally:
        # New connections are refused from now on: in the queues of open sockets they would hang.
        for listener in listeners:
            listener.close()
        await fleet.stop()
        log.info("proxy_down")


class Fleet:
    """The ingester and the workers, and the folder that they share (metrics, states, pins).

    Attributes:
        workers: the workers, in the order of their sockets.
        gave_up: gets a `DoesNotStart` if the ingester or a worker never comes up.
    """

    def __init__(self, settings: ProxySettings, listeners: Sequence[socket.socket]) -> None:
        """Prepare the ingester, and a worker for each of the sockets; nothing is started yet."""
        self.gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shared = SharedFolder()
        self._stopping = False
        run, shared = run_module("pawl.serving.child"), ["--shared", str(self._shared.path)]
        # The ingester must not inherit the sockets: holding one would keep the port taken.
        self.ingester = Child(
            "ingester",
            [*run, "ingester", *shared],
            (),
            self._write_states,
            self.gave_up,
            stop_s=settings.ingester_ends_s,
        )
        self.workers = [
            Child(
                f"worker {number}",
                [*run, "worker", *shared, "--listener", str(fd)],
                (fd,),
                self._write_states,
                self.gave_up,
                stop_s=settings.workers_end_s,
            )
            for number, fd in enumerate(listener.fileno() for listener in listeners)
        ]

    async def start(self) -> None:
        """Start all processes, the ingester first.

        Raises:
            OSError: the operating system cannot start a process now.
        """
        self._write_states()
        for child in (self.ingester, *self.workers):
            await child.start()

    async def replace(self) -> None:
        """Replace the workers one after another; stop at the first that cannot be replaced.

        Raises:
            NotReplaced: a new worker did not come up.
            OSError: the operating system cannot start a process now.
        """
        for worker in self.workers:
            await worker.replace()

    async def announce_stop(self, for_s: float) -> None:
        """Report all workers as stopping for `for_s` seconds, though they still take calls."""
        self._stopping = True
        self._write_states()
        log.info("proxy_stops", in_s=for_s)
        await asyncio.wait([self.gave_up], timeout=for_s)

    async def stop(self) -> None:
        """Let all processes finish their work and end."""
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        # The ingester ends last, so that it stores what the workers have written until their end.
        await self.ingester.stop()
        self._shared.remove()

    def _write_states(self) -> None:
        states = [worker.state for worker in self.workers]
        if self._stopping:
            states = [msgspec.structs.replace(state, state="stopping") for state in states]
        try:
            write_states(self._shared.path, states)
        except OSError as error:
            log.error("states_not_written", reason=str(error))


async def _until_stopped(
    settings: ProxySettings, fleet: Fleet, stop: asyncio.Event, replace: asyncio.Event
) -> None:
    stopping = asyncio.create_task(stop.wait())
    replacing = asyncio.create_task(_replace_at_sighup(settings, fleet, replace))
    ends: set[asyncio.Future[Any]] = {stopping, fleet.gave_up}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    replacing.cancel()
    await asyncio.wait([replacing])
    if fleet.gave_up.done():
        fleet.gave_up.result()


async def _replace_at_sighup(settings: ProxySettings, fleet: Fleet, replace: asyncio.Event) -> None:
    """Replace the workers at each SIGHUP; if that fails, the old ones go on serving."""
    while True:
        await replace.wait()
        replace.clear()
        try:
            check_files(settings)
            await fleet.replace()
        except (BadUpstreams, BadPolicies, BadRedaction, NotReplaced) as error:
            log.error("workers_not_replaced", reason=str(error))
        except Exception:
            log.exception("workers_not_replaced")
        else:
            log.info("workers_replaced", workers=len(fleet.workers))


def check_files(settings: ProxySettings) -> None:
    """Check the files of upstreams, policies and redaction, and that spans can be sent if wanted.

    Raises:
        BadUpstreams, BadPolicies, BadRedaction, NoSpans: a check failed.
    """
    check_upstreams(settings)
    open_policies(settings.policies)
    open_redactor(settings)
    if settings.otel:
        check_spans()


def check_spans() -> None:
    """Check that OpenTelemetry's packages are installed and its environment variables usable.

    Raises:
        NoSpans: they are not.
    """
    try:
        from proxy.ingester.spans import check_environment
    except ImportError as error:
        raise NoSpans(
            "PAWL_OTEL is set, and OpenTelemetry's packages are not installed here: "
            f"`{install_command('otel')}`, or leave the setting out"
        ) from error
    check_environment(os.environ)
