"""One child process: its log file, its restarts, its end. No child outlives its parent."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

STOP_S: Final = 10.0
RESTART_S: Final = 0.2
PR_SET_PDEATHSIG: Final = 1
# More restarts than this without the process ever living for a minute: it will not come up.
MOST_RESTARTS: Final = 5
LIVED_S: Final = 60.0


class ProcessFailed(Exception):
    """A process of the stack ended and could not be kept up; the message shows its last words."""


class Process:
    """A command that is kept running until it is told to stop."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_dir: Path,
        *,
        stop_s: float = STOP_S,
    ) -> None:
        self.name = name
        self.restarts = 0
        self.failed: ProcessFailed | None = None
        self._stop_s = stop_s
        self._command = list(command)
        self._environment = dict(environment)
        self.log_file = log_dir / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The running process's id."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start it, and again whenever it ends by itself."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep-{self.name}")

    async def stop(self) -> None:
        """End it and all that it started: SIGTERM, and SIGKILL for what does not heed it."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), self._stop_s)
            except TimeoutError:
                log.warning("process_killed", process=self.name, after_s=self._stop_s)
                self._kill_group()
                await self._process.wait()
        self._kill_group()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    def last_words(self, lines: int = 12) -> str:
        """The end of its log."""
        if not self.log_file.exists():
            return ""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def _kill_group(self) -> None:
        """End what the process left behind: vLLM's engine is a child that can outlive it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _spawn(self) -> None:
        with self.log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C reaches the parent alone, which stops the others in order.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        short_lives = 0
        while not self._stopping:
            assert self._process is not None
            born = loop.time()
            code = await self._process.wait()
            if self._stopping:
                return
            self._kill_group()
            short_lives = short_lives + 1 if loop.time() - born < LIVED_S else 1
            log.warning("process_ended", process=self.name, code=code, restarts=self.restarts)
            if short_lives > MOST_RESTARTS or code == 2:
                self.failed = ProcessFailed(
                    f"{self.name} ended with code {code}; the end of {self.log_file}:\n"
                    + self.last_words()
                )
                return
            await asyncio.sleep(RESTART_S)
            self.restarts += 1
            await self._spawn()


def _die_with_parent() -> None:
    """Have the kernel end this child when its parent is gone, however it went (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
