"""Keep a child process of the supervisor running: restart it after pauses that grow.

A process reports over a pipe that it is up. If a process ends again and again and was never up, its
settings or its code cannot work, and `DoesNotStart` tells the operator. A process that was up once,
or that a full or failing disk keeps from starting, is restarted without end.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from proxy.errors import DoesNotStart, ProxyError
from proxy.shared_memory import ProcessState, State

log = structlog.get_logger()

# How long a worker may finish its calls if it is replaced, or its supervisor was killed. This is
# long, because nothing waits for its end; if the proxy stops, `PAWL_STOP_GRACE_S` holds instead.
LEAVE_S: Final = 600.0
# How long the worker may take after that to break off its calls and make their records durable.
LEAVE_MARGIN_S: Final = 10.0

# Status of a process that a disk keeps from starting: it may well start later (sysexits.h).
DISK_FAILS: Final = os.EX_TEMPFAIL

STOP: Final = signal.SIGTERM
LEAVE: Final = signal.SIGHUP

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 30.0
# A process that ran this long is healthy: the next pause is the shortest again.
HEALTHY_S: Final = 30.0
# A process that ends within this time and was never up counts as a failed start.
YOUNG_S: Final = 20.0
MOST_EARLY_ENDS: Final = 5
# SIGKILL comes from outside (the kernel, when memory is short), and a disk may work again: neither
# is a failed start.
PASSING_ENDS: Final = (-signal.SIGKILL, DISK_FAILS)
# A process's report: this, or the reason why it cannot start.
UP: Final = b"up"
MOST_REPORTED: Final = 4096
# How long a process that is to replace another may take until it is up.
START_S: Final = 120.0
# How long a process that closed its pipe without coming up may take to end by itself.
ENDING_S: Final = 2.0


class NotReplaced(ProxyError):
    """Report that a replacement did not come up; the old process goes on serving."""


class Running:
    """A process that was started.

    Attributes:
        started: when it was started, on the monotonic clock.
        up: becomes true when the process reports that it is up, and false if it ends before.
        why: the reported reason why it cannot start; empty if none was reported.
    """

    def __init__(self, process: asyncio.subprocess.Process, ready: int) -> None:
        """Store the process and watch `ready`, the pipe on which it reports that it is up."""
        self.process = process
        self.started = time.monotonic()
        self.up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.why = ""
        self._ready = ready
        asyncio.get_running_loop().add_reader(ready, self._on_ready)

    def _on_ready(self) -> None:
        """Read the report; if the pipe closes without one, the process never came up."""
        loop = asyncio.get_running_loop()
        report = os.read(self._ready, MOST_REPORTED)
        loop.remove_reader(self._ready)
        os.close(self._ready)
        if not self.up.done():
            self.why = "" if report == UP else report.decode(errors="replace")
            self.up.set_result(report == UP)


class Child:
    """Runs a process, restarts it whenever it ends by itself, and replaces it when asked."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        fds: Sequence[int],
        on_change: Callable[[], None],
        gave_up: "asyncio.Future[None]",
        *,
        stop_s: float,
    ) -> None:
        """Store the arguments; nothing is started yet.

        Args:
            name: the process's name, for logs and `/readyz`.
            command: its command line.
            fds: file descriptors that it inherits.
            on_change: called whenever `state` has changed.
            gave_up: gets a `DoesNotStart` if the process ends again and again and was never up.
            stop_s: how long the process may take to end when it is told to, in seconds.
        """
        self.name = name
        self._stop_s = stop_s
        self._command = command
        self._fds = fds
        self._on_change = on_change
        self._gave_up = gave_up
        self._present: Running | None = None
        self._others: set[Running] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._replacing = False
        self._ended_meanwhile = False
        self._was_up = False
        self._stop = asyncio.Event()
        self._early_ends = 0
        self._pause_s = FIRST_PAUSE_S
        self._state = ProcessState(name, "starting", time.time(), 0)

    @property
    def stopping(self) -> bool:
        """Return whether the process was told to end for good."""
        return self._stop.is_set()

    @property
    def state(self) -> ProcessState:
        """Return the process's state, as `/readyz` shows it."""
        return self._state

    async def start(self) -> None:
        """Start the process, and keep it running from now on.

        Raises:
            OSError: the operating system cannot start a process now.
        """
        self._make_present(await self._spawn())

    async def replace(self) -> None:
        """Start a new process; once it is up, let the old one finish its work and end.

        Raises:
            NotReplaced: the new process did not come up; the old one goes on serving.
            OSError: the operating system cannot start a process now.
        """
        self._replacing, self._ended_meanwhile = True, False
        try:
            new = await self._spawn()
            # `stop` must end the new process too, before it is the present one.
            self._others.add(new)
            await self._wait_until_up(new)
        except Exception:
            if self._ended_meanwhile:
                self._start_task(self._start_again())
            raise
        finally:
            self._replacing = False
        self._others.discard(new)
        old = self._present
        self._make_present(new)
        if old is not None:
            self._others.add(old)
            await end_process(old.process, self.name, LEAVE, LEAVE_S + LEAVE_MARGIN_S)
            self._others.discard(old)

    async def stop(self) -> None:
        """End the process, and any other one of a replacement, once each has finished its work."""
        self._stop.set()
        self._set_state("stopping")
        present = {self._present, *self._others}
        await asyncio.gather(*(self._end(one) for one in present if one is not None))
        # A restart may be in progress at this moment.
        await asyncio.gather(*self._tasks)

    async def _spawn(self) -> Running:
        ready, report = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--ready",
                str(report),
                pass_fds=(*self._fds, report),
                # However the supervisor ends, this pipe closes, and the process ends too.
                stdin=asyncio.subprocess.PIPE,
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(report)
        log.info("child_started", child=self.name, pid=process.pid)
        return Running(process, ready)

    def _make_present(self, running: Running) -> None:
        """Make `running` the present process, and watch it."""
        self._present = running
        if running.up.done():
            self._note_up()
        else:
            self._set_state("starting")
        self._start_task(self._watch(running))

    async def _watch(self, running: Running) -> None:
        if await running.up and self._present is running and not self.stopping:
            self._note_up()
        status = await running.process.wait()
        if self._present is not running or self.stopping:
            return
        self._note_end(running, status)
        if self._replacing:
            self._ended_meanwhile = True
        else:
            await self._start_again()

    async def _start_again(self) -> None:
        """Start the process after a pause, which doubles while the process does not stay up."""
        while not await self._stopped_within(self._pause_s):
            if self._was_up or self._state.last_exit == DISK_FAILS:
                self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
            try:
                running = await self._spawn()
            except Exception as error:
                # The machine lacks processes, memory or file descriptors; it may have some later.
                reason = f"{type(error).__name__}: {error}"
                log.error("child_not_started", child=self.name, reason=reason)
                continue
            if self.stopping:
                await self._end(running)
            else:
                self._make_present(running)
            return

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return self.stopping

    def _note_up(self) -> None:
        self._was_up = True
        self._set_state("up")

    def _note_end(self, running: Running, status: int) -> None:
        lived_s = time.monotonic() - running.started
        if lived_s >= HEALTHY_S:
            self._pause_s = FIRST_PAUSE_S
        early = not self._was_up and lived_s < YOUNG_S and status not in PASSING_ENDS
        self._early_ends = self._early_ends + 1 if early else 0
        pause_s = round(self._pause_s, 1)
        log.error("child_ended", child=self.name, status=status, again_in_s=pause_s)
        self._set_state("restarting", restarts=self._state.restarts + 1, last_exit=status)
        if self._early_ends >= MOST_EARLY_ENDS and not self._gave_up.done():
            why = running.why or f"it ended {self._early_ends} times, with status {status}"
            self._gave_up.set_exception(DoesNotStart(f"{self.name} cannot start: {why}"))

    async def _wait_until_up(self, new: Running) -> None:
        try:
            async with asyncio.timeout(START_S):
                came_up = await new.up
        except TimeoutError:
            came_up = False
        if came_up:
            return
        status = await self._end_failed(new)
        self._others.discard(new)
        raise NotReplaced(
            f"the process that was to replace {self.name} did not come up:"
            f" {new.why or f'it ended with status {status}'}. The old process goes on serving"
        )

    async def _end_failed(self, new: Running) -> int:
        """Return the status of a process that did not come up; kill it after `ENDING_S` seconds."""
        try:
            # A signal to a process that has just ended would take its status away from us.
            return await asyncio.wait_for(new.process.wait(), ENDING_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                new.process.kill()
            return await new.process.wait()

    async def _end(self, running: Running) -> None:
        await end_process(running.process, self.name, STOP, self._stop_s)

    def _set_state(self, state: State, **changed: int) -> None:
        since = time.time()
        self._state = msgspec.structs.replace(self._state, state=state, since=since, **changed)
        self._on_change()

    def _start_task(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(self._run_or_restart(work), name=f"pawl-watch-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_or_restart(self, work: Coroutine[object, object, None]) -> None:
        """Run `work`; if it fails unexpectedly, log it and restart the process if it has ended."""
        try:
            await work
        except Exception:
            log.exception("watching_failed", child=self.name)
            if self._present is not None and self._present.process.returncode is not None:
                await self._start_again()


async def end_process(
    process: asyncio.subprocess.Process, name: str, how: signal.Signals, within_s: float
) -> None:
    """Send a process the signal `how` and wait for its end; kill it after `within_s` seconds."""
    with suppress(ProcessLookupError):
        process.send_signal(how)
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        log.error("child_killed", child=name, pid=process.pid, reason="it did not end in time")
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
