"""One process of the supervisor's, kept up: started again with growing pauses, never given up.

A process says that it is up over a pipe. One that never was, and ends again and again, is told
to the operator at the first start (`DoesNotStart`): its settings or its code cannot work. One that
was up once is started again for ever.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Final

import structlog

from pawl.serving.ending import LEAVE, LEAVE_MARGIN_S, LEAVE_S, STOP, end
from proxy.counting.board import ProcessState, State
from proxy.errors import DoesNotStart, ProxyError

log = structlog.get_logger()

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 30.0
# Who lived so long is healthy: the pauses begin anew.
HEALTHY_S: Final = 30.0
# Ended so soon and never up: it did not fail at its work.
YOUNG_S: Final = 20.0
MOST_EARLY_ENDS: Final = 5
# How long the one that is to replace another may take until it serves.
START_S: Final = 120.0


class NotReplaced(ProxyError):
    """The process that was to replace another never came up; the other one serves on."""


class Running:
    """A process that was started, and whether it has said that it is up."""

    def __init__(self, process: asyncio.subprocess.Process, said: int) -> None:
        self.process = process
        self.started = time.monotonic()
        self.up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._said = said
        asyncio.get_running_loop().add_reader(said, self._on_said)

    def _on_said(self) -> None:
        """Read its word; the pipe's end without one says that it never came up."""
        loop = asyncio.get_running_loop()
        word = os.read(self._said, 16)
        loop.remove_reader(self._said)
        os.close(self._said)
        if not self.up.done():
            self.up.set_result(bool(word))


class Child:
    """One process, started again whenever it ends by itself."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        fds: Sequence[int],
        changed: Callable[[], None],
        gave_up: "asyncio.Future[None]",
        *,
        stop_s: float,
    ) -> None:
        """`changed` is called when its state has; `gave_up` is told of a `DoesNotStart`.

        `stop_s` is how long it may take to end when it is told to.
        """
        self.name = name
        self._stop_s = stop_s
        self._command = command
        self._fds = fds
        self._changed = changed
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
        """Say whether it was told to end for good."""
        return self._stop.is_set()

    @property
    def state(self) -> ProcessState:
        """What is told of it."""
        return self._state

    async def start(self) -> None:
        """Start it, and keep it up from now on.

        Raises:
            OSError: this machine starts no process now.
        """
        self._take(await self._spawn())

    async def replace(self) -> None:
        """Start another one; once that is up, let the present one finish its work and end.

        Raises:
            NotReplaced: the other one did not come up; the present one serves on.
            OSError: this machine starts no process now.
        """
        self._replacing, self._ended_meanwhile = True, False
        try:
            new = await self._spawn()
            # Until it is the present one, `stop` must know of it too.
            self._others.add(new)
            await self._see_up(new)
        except Exception:
            if self._ended_meanwhile:
                self._do(self._start_again())
            raise
        finally:
            self._replacing = False
        self._others.discard(new)
        old = self._present
        self._take(new)
        if old is not None:
            self._others.add(old)
            await end(old.process, self.name, LEAVE, LEAVE_S + LEAVE_MARGIN_S)
            self._others.discard(old)

    async def stop(self) -> None:
        """Let it finish its work and end, and one that is being replaced."""
        self._stop.set()
        self._show("stopping")
        present = {self._present, *self._others}
        await asyncio.gather(*(self._end(one) for one in present if one is not None))
        # One may have been starting it again at this moment.
        await asyncio.gather(*self._tasks)

    async def _spawn(self) -> Running:
        said, saying = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--ready",
                str(saying),
                pass_fds=(*self._fds, saying),
                # It ends with us, however we end: its standard input closes then.
                stdin=asyncio.subprocess.PIPE,
            )
        except BaseException:
            os.close(said)
            raise
        finally:
            os.close(saying)
        log.info("child_started", child=self.name, pid=process.pid)
        return Running(process, said)

    def _take(self, running: Running) -> None:
        """Have this one be the present one."""
        self._present = running
        if running.up.done():
            self._note_up()
        else:
            self._show("starting")
        self._do(self._watch(running))

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
        """Start it after a pause that grows while it does not stay up."""
        while not await self._stopped_within(self._pause_s):
            if self._was_up:
                self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
            try:
                running = await self._spawn()
            except Exception as error:
                # No process, no memory, no file descriptor: there may be one later.
                reason = f"{type(error).__name__}: {error}"
                log.error("child_not_started", child=self.name, reason=reason)
                continue
            if self.stopping:
                await self._end(running)
            else:
                self._take(running)
            return

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return self.stopping

    def _note_up(self) -> None:
        self._was_up = True
        self._show("up")

    def _note_end(self, running: Running, status: int) -> None:
        lived_s = time.monotonic() - running.started
        if lived_s >= HEALTHY_S:
            self._pause_s = FIRST_PAUSE_S
        # One that somebody killed (the kernel, for its memory) did not fail to start.
        early = not self._was_up and lived_s < YOUNG_S and status != -signal.SIGKILL
        self._early_ends = self._early_ends + 1 if early else 0
        pause_s = round(self._pause_s, 1)
        log.error("child_ended", child=self.name, status=status, again_in_s=pause_s)
        self._show("restarting", restarts=self._state.restarts + 1, last_exit=status)
        if self._early_ends >= MOST_EARLY_ENDS and not self._gave_up.done():
            why = f"{self.name} ends as soon as it is started; see its log above"
            self._gave_up.set_exception(DoesNotStart(why))

    async def _see_up(self, new: Running) -> None:
        try:
            async with asyncio.timeout(START_S):
                came_up = await new.up
        except TimeoutError:
            came_up = False
        if came_up:
            return
        with suppress(ProcessLookupError):
            new.process.kill()
        status = await new.process.wait()
        self._others.discard(new)
        raise NotReplaced(
            f"the process that was to replace {self.name} did not come up (status {status}); "
            "see its log above. The present one serves on"
        )

    async def _end(self, running: Running) -> None:
        await end(running.process, self.name, STOP, self._stop_s)

    def _show(
        self, state: State, *, restarts: int | None = None, last_exit: int | None = None
    ) -> None:
        before = self._state
        self._state = ProcessState(
            self.name,
            state,
            time.time(),
            before.restarts if restarts is None else restarts,
            before.last_exit if last_exit is None else last_exit,
        )
        self._changed()

    def _do(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(self._to_its_end(work), name=f"pawl-watch-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _to_its_end(self, work: Coroutine[object, object, None]) -> None:
        """Whatever goes wrong while a process is watched, it goes on being kept up."""
        try:
            await work
        except Exception:
            log.exception("watching_failed", child=self.name)
            if self._present is not None and self._present.process.returncode is not None:
                await self._start_again()
