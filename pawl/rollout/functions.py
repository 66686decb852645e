"""Run a Python function as an agent, in processes of `pawl.rollout.function_host`.

A process that hangs or crashes is replaced, and affects no run of another process.
"""

import asyncio
import itertools
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from pawl.processes import die_with_parent
from pawl.programs import without_pawl_settings
from pawl.rollout import function_host
from pawl.rollout.agents import Agent, Request, Result, run_environment, time_limit_result
from pawl.rollout.tasks import RolloutError
from store.records import Record

# A client made while the module is imported belongs to no run: its calls must fail.
NOWHERE: Final = "http://127.0.0.1:1/made-at-import-not-in-the-run"
# A run that blocks the event loop it shares is killed, with its process, this long after its limit.
GRACE_S: Final = 5.0


class FunctionAgent(Agent):
    """Calls a Python function, in up to `at_once` processes, each of which imports it once."""

    def __init__(
        self, name: str, log: Path, at_once: int, *, option: str = "--python", folder: Path
    ) -> None:
        """Store MODULE:FUNCTION, searched in `folder` first; what it prints goes to `log`.

        Errors name the function as the value of the command line's `option`.
        """
        self._program = _Program(sys.executable, f"{option} {name}", (name, "one"), folder, log)
        self._hosts = set[_Host]()
        # Last in, first out: no more processes are started than needed (None: not started yet).
        self._idle: asyncio.LifoQueue[_Host | None] = asyncio.LifoQueue()
        for _ in range(at_once):
            self._idle.put_nowait(None)

    async def start(self) -> None:
        """Start the first process, or raise RolloutError if it cannot import the function."""
        self._idle.get_nowait()
        host = await self._program.start_first()
        self._hosts.add(host)
        self._idle.put_nowait(host)

    async def stop(self) -> None:
        """Kill the processes that call the function, running or idle, and their groups."""
        await asyncio.gather(*(host.kill() for host in self._hosts))

    async def run(self, request: Request) -> Result:
        """Call the function once in an idle process."""
        host = await self._idle.get()
        try:
            if host is None or host.has_ended:
                self._hosts -= {host}
                host = await self._program.start()
                self._hosts.add(host)
            async with asyncio.timeout(request.limit_s):
                return await host.call(request)
        except ImportError as error:
            return Result(error="not started", detail=str(error))
        except BaseException as error:
            if host is not None:
                await host.kill()
            if isinstance(error, TimeoutError):
                return time_limit_result(request.limit_s)
            raise
        finally:
            self._idle.put_nowait(host)


class CoroutineAgent(Agent):
    """Calls a coroutine function concurrently, in one process of another Python."""

    def __init__(self, interpreter: str, name: str, folder: Path, log: Path) -> None:
        """Store the path of the Python, the function as MODULE:FUNCTION, its folder and its log."""
        self._program = _Program(interpreter, f"the agent {name}", (name, "many"), folder, log)
        self._host: _Host | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process, or raise RolloutError if it cannot import the function."""
        self._host = await self._program.start_first()

    async def stop(self) -> None:
        """Kill the process that runs the function, and its group."""
        if self._host is not None:
            await self._host.kill()

    async def run(self, request: Request) -> Result:
        """Run the function once; if it blocks the event loop, all runs of the process fail."""
        try:
            async with self._starting:
                if self._host is None or self._host.has_ended:
                    self._host = await self._program.start()
                host = self._host
            async with asyncio.timeout(request.limit_s + GRACE_S):
                return await host.call(request)
        except ImportError as error:
            return Result(error="not started", detail=str(error))
        except TimeoutError:
            await host.kill()
            return time_limit_result(request.limit_s)


class _Program(Record, frozen=True):
    """The command of a function's processes, their folder and the log of what they print."""

    interpreter: str
    about: str
    arguments: tuple[str, str]
    folder: Path
    log: Path

    async def start_first(self) -> "_Host":
        """Start a process, or raise RolloutError if it cannot import the function."""
        try:
            return await self.start()
        except ImportError as error:
            raise RolloutError(f"{self.about}: {error}. See {self.log}") from error

    async def start(self) -> "_Host":
        """Start a process, and wait until it has imported the function, or raise ImportError."""
        kept = without_pawl_settings(os.environ)
        try:
            process = await self._spawn(kept | run_environment(NOWHERE, given=kept))
        except OSError as error:
            raise ImportError(f"its process cannot be started: {error}") from error
        host = _Host(process, self.log)
        try:
            first = await host.reply_to(None)
        except asyncio.CancelledError:
            await host.kill()
            raise
        if first is None:
            raise ImportError("its process ended during the import")
        if "error" in first:
            await host.kill()
            raise ImportError(first["error"])
        return host

    async def _spawn(self, environment: Mapping[str, str]) -> Process:
        # Only the owner may read what agents print.
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                *(self.interpreter, "-P", function_host.__file__, *self.arguments),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                cwd=self.folder,
                env=environment,
                limit=function_host.MAX_LINE,
                # Ctrl-C must reach the parent alone, and the group is killed as a whole.
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(log)


class _Host:
    """A process that calls the function, from its start to its end."""

    def __init__(self, process: Process, log: Path) -> None:
        self.has_ended = False
        self._process = process
        self._log = log
        self._numbers = itertools.count()
        self._waiting: dict[int | None, asyncio.Future[dict[str, Any] | None]] = {}
        self._reading = asyncio.create_task(self._read_replies())

    async def call(self, request: Request) -> Result:
        """Call the function once."""
        number = next(self._numbers)
        message = {"id": number, **msgspec.structs.asdict(request)}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        result = await self.reply_to(number)
        if result is None:
            return Result(error="crashed", detail=f"its process ended; see {self._log}")
        return msgspec.convert(result, Result)

    async def reply_to(self, number: int | None) -> dict[str, Any] | None:
        """Return the reply to a request, the first reply for None, or None if the process ends."""
        if self.has_ended:
            return None
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            result: dict[str, Any] | None = await waiting
            return result
        finally:
            del self._waiting[number]

    async def kill(self) -> None:
        """Kill the process and its group, unless it has ended, and wait for its end."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.wait([self._reading])

    async def _read_replies(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                reply = msgspec.json.decode(line)
                waiting = self._waiting.get(reply["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply["result"])
        finally:
            # Processes that it started may be left.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            self.has_ended = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(None)
