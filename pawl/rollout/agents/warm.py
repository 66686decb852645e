"""Run Python agents in warm workers, so that their imports are paid for once."""

import asyncio
import itertools
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec

from pawl.programs import REST_S, die_with_parent, hang_up, not_ours
from pawl.rollout.addresses import Request, keys
from pawl.rollout.agents import worker as worker_program
from pawl.rollout.agents.agent import Agent, Result, out_of_time, status_words
from pawl.rollout.errors import RolloutError, RunLost, WorkerCrashed
from store.records import Record

# Runs that share a worker, where the function can run several at once.
SHARING: Final = 16
# Runs at once that have a worker to themselves, because one that they shared has crashed.
ALONE: Final = 4
# A function that several runs share ends them itself; if it does not, this much later.
GRACE_S: Final = 5.0
MOST_LINE: Final = 8 * worker_program.MOST_OUTPUT


class Function(Record, frozen=True, kw_only=True):
    """Name a Python function, and say how it is run.

    Attributes:
        option: the option that names it, for messages.
        name: as MODULE:FUNCTION.
        log_file: what it prints goes here.
        folder: where its module is looked for first; None: the working folder.
        model_is_told: whether the runner says which model to ask for.
        interpreter: the Python that runs it.
    """

    option: str = "--python"
    name: str
    log_file: Path
    folder: Path | None = None
    model_is_told: bool = False
    interpreter: str = sys.executable


class WarmAgent(Agent):
    """Run a Python function in a few worker processes, each of which imports it once."""

    def __init__(self, function: Function) -> None:
        """Store what is run."""
        self._function = function
        self._workers: list[WarmWorker] = []
        # Started when they are needed first.
        self._single = [WarmWorker(function) for _ in range(ALONE)]
        self._idle: asyncio.Queue[WarmWorker] = asyncio.Queue()
        for worker in self._single:
            self._idle.put_nowait(worker)

    async def start(self, at_once: int) -> None:
        """Start the workers: one for each run at once, or a few that runs share.

        Raises:
            RolloutError: the function cannot be imported.
        """
        first = WarmWorker(self._function)
        self._workers = [first]
        await first.ready()
        count = math.ceil(at_once / SHARING) if first.shared else at_once
        self._workers += [WarmWorker(self._function) for _ in range(count - 1)]

    async def stop(self) -> None:
        """End the workers, whatever they do."""
        await asyncio.gather(*(worker.kill() for worker in (*self._workers, *self._single)))

    async def run(self, request: Request) -> Result:
        """Run the function in the worker that has least to do, or in one of its own.

        Raises:
            RunLost: its worker was killed because another run in it took too long.
            WorkerCrashed: its worker ended by itself, and this was not the only run in it.
        """
        if not request.alone:
            return await min(self._workers, key=lambda worker: worker.busy).run(request)
        worker = await self._idle.get()
        try:
            return await worker.run(request)
        finally:
            self._idle.put_nowait(worker)


class WarmWorker:
    """Keep one worker process, which is started when it is needed, and again after it has ended."""

    def __init__(self, function: Function) -> None:
        """Store what it runs."""
        self.shared = False
        self.busy = 0
        self._function = function
        self._command = [function.interpreter, "-P", worker_program.__file__, function.name]
        self._command.append("model" if function.model_is_told else "no-model")
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._transport: asyncio.SubprocessTransport | None = None
        self._reader: asyncio.Task[None] | None = None
        self._killed = False

    async def ready(self) -> None:
        """Start the process unless it runs, and wait until it has imported the function.

        Raises:
            RolloutError: the function cannot be imported.
        """
        async with self._starting:
            if self._reader is not None and not self._reader.done():
                return
            self._process = await self._started()
            self._killed = False
            await self._imported(self._process)
            self._reader = asyncio.create_task(self._read(self._process))

    async def _started(self) -> Process:
        loop = asyncio.get_running_loop()
        with _opened_privately(self._function.log_file) as log:
            self._transport, protocol = await loop.subprocess_exec(
                lambda: _Pipes(limit=MOST_LINE, loop=loop),
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                cwd=self._function.folder,
                env=environment_at_import(not_ours(os.environ)),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return Process(self._transport, protocol, loop)

    async def _imported(self, process: Process) -> None:
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
        except BaseException:
            await self.kill()
            raise
        message = msgspec.json.decode(line) if line else {"ready": False}
        if not message["ready"]:
            status = await self._ended(process)
            reason = message.get("error") or f"the worker ended with {_end_words(status)}"
            raise RolloutError(
                f"{self._function.option} {self._function.name}: {reason}. It is imported in the "
                f"folder where `pawl rollout` is started, by {self._function.interpreter}; see "
                f"{self._function.log_file}"
            )
        self.shared = bool(message["shared"])

    async def run(self, request: Request) -> Result:
        """Run the function once.

        Raises:
            RunLost: see `WarmAgent.run`.
            WorkerCrashed: likewise.
        """
        self.busy += 1
        try:
            return await self._run(request)
        except RolloutError as error:
            return Result(error="not started", detail=str(error))
        except TimeoutError:
            await self.kill()
            return out_of_time(request.limit_s)
        except asyncio.CancelledError:
            # The function may be at work on it, and would be for the next run, too.
            await self.kill()
            raise
        finally:
            self.busy -= 1

    async def _run(self, request: Request) -> Result:
        await self.ready()
        assert self._process is not None
        assert self._process.stdin is not None
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        line = msgspec.json.encode(
            {
                "id": number,
                "task": request.task,
                "base_url": f"{request.base_url}/v1",
                "model": request.model,
                "environment": request.environment,
                "limit_s": request.limit_s,
            }
        )
        try:
            grace_s = GRACE_S if self.shared else 0.0
            async with asyncio.timeout(request.limit_s + grace_s):
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._process.stdin.write(line + b"\n")
                    await self._process.stdin.drain()
                return _result(await answer, request)
        finally:
            self._waiting.pop(number, None)

    async def _read(self, process: Process) -> None:
        """Hand replies to the runs that wait for them; at the worker's end, tell all that wait."""
        assert process.stdout is not None
        with suppress(ValueError):  # a reply beyond all measure ends the worker
            while line := await process.stdout.readline():
                message = msgspec.json.decode(line)
                answer = self._waiting.get(message["id"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
        _kill_group(process)
        words = _end_words(await self._ended(process))
        detail = f"the worker ended; see {self._function.log_file}"
        left = [answer for answer in self._waiting.values() if not answer.done()]
        for answer in left:
            if self._killed:
                answer.set_exception(RunLost("its worker was stopped for the sake of another run"))
            elif len(left) > 1:
                answer.set_exception(
                    WorkerCrashed(f"{words} with {len(left)} runs in it: {detail}")
                )
            else:
                answer.set_result({"error": words, "detail": detail})

    async def kill(self) -> None:
        """End the process; runs that are under way in it are lost."""
        process, reader = self._process, self._reader
        if process is None:
            return
        self._killed = True
        _kill_group(process)
        await self._ended(process)
        if reader is not None:
            await asyncio.wait([reader])

    async def _ended(self, process: Process) -> int:
        """Return the status of a process that ends; a daemon of its may go on with its pipes."""
        assert self._transport is not None
        hang_up(self._transport)
        return await process.wait()


class _Pipes(SubprocessStreamProtocol):
    """Hang up soon after a worker's end: a child of its may hold the other side open for ever."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._worker = cast(asyncio.SubprocessTransport, transport)

    def process_exited(self) -> None:
        super().process_exited()
        # What it wrote last is on the way.
        asyncio.get_running_loop().call_later(REST_S, hang_up, self._worker)


def _end_words(status: int) -> str:
    """Return how a worker ended that was not to end, as a failure's kind."""
    return status_words(status) or "exit status 0"


def _kill_group(process: Process) -> None:
    """Kill a worker with all that its runs started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _opened_privately(path: Path) -> BinaryIO:
    """Open a log that nobody else may read: what agents print may hold anything."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")


def _result(message: dict[str, Any], request: Request) -> Result:
    if message.get("error") == "time limit":
        return out_of_time(request.limit_s)
    value = message.get("value")
    return Result(
        output=worker_program.as_text(value),
        error=message.get("error"),
        detail=message.get("detail", ""),
        errors=message.get("errors", ""),
        value=value,
    )


def environment_at_import(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment before its first run: no base URL that leads anywhere."""
    url = worker_program.NOWHERE
    addresses = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
    return {**inherited, **keys(inherited), **addresses}
