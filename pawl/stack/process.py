"""Run a child process with a log file: restarted when it ends, never outliving its parent."""

import asyncio
import math
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from pawl.processes import die_with_parent

log = structlog.get_logger()

STOP_S: Final = 10.0
RESTART_S: Final = 0.2
# After more short lives in a row than this, a process is given up: it cannot start.
MOST_RESTARTS: Final = 5
# A life is short if the process ends within this time.
SHORT_LIFE_S: Final = 60.0
LAST_BYTES: Final = 16 * 1024


class ProcessFailed(Exception):
    """Report that a process cannot be kept running; the message ends with the end of its log."""


class Process:
    """Runs a command, and restarts it whenever it ends by itself, until `stop`.

    A command that ends with status 2, or again and again soon after its start, is given up:
    `failed` has the reason. `log_file` has its standard output and standard error.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_dir: Path,
        *,
        stop_s: float = STOP_S,
    ) -> None:
        """Store the command; `stop` waits `stop_s` seconds from SIGTERM to SIGKILL."""
        self.name = name
        self.restarts = 0
        self.failed: ProcessFailed | None = None
        self._stop_s = stop_s
        self._command = list(command)
        self._environment = dict(environment)
        self.log_file = log_dir / f"{name}.log"
        # The size of the log, in bytes, when the process was last started.
        self._began_at = 0
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Return the id of the running process, or None before the first start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process, and restart it from now on whenever it ends by itself."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        await self._spawn()
        self._keeping = asyncio.create_task(self._keep_running(), name=f"keep-{self.name}")

    async def stop(self, within_s: float = math.inf) -> None:
        """Stop the process (SIGTERM, SIGKILL after `stop_s` seconds), and kill its children.

        `within_s` (seconds) replaces a longer `stop_s`.
        """
        self._stopping = True
        stop_s = min(self._stop_s, within_s)
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), stop_s)
            except TimeoutError:
                log.warning("process_killed", process=self.name, after_s=stop_s)
                self._kill_group()
                await self._process.wait()
        self._kill_group()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    def last_log_lines(self, lines: int = 12) -> str:
        """Return the last lines of the log since the last start, at most 16 KiB."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as log_file:
            log_file.seek(max(self._began_at, log_file.seek(0, os.SEEK_END) - LAST_BYTES))
            words = log_file.read().decode(errors="replace")
        return "\n".join(words.splitlines()[-lines:])

    def _kill_group(self) -> None:
        """Kill the process if it runs, and its children: vLLM's engine can outlive its server."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _spawn(self) -> None:
        with self.log_file.open("ab") as output:
            self._began_at = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C must reach the parent alone, which stops its children in order.
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        short_lives = 0
        while not self._stopping:
            assert self._process is not None
            born = loop.time()
            code = await self._process.wait()
            if self._stopping:
                return
            self._kill_group()
            short_lives = short_lives + 1 if loop.time() - born < SHORT_LIFE_S else 1
            log.warning("process_ended", process=self.name, code=code, restarts=self.restarts)
            if short_lives > MOST_RESTARTS or code == 2:
                self.failed = ProcessFailed(
                    f"{self.name} ended with code {code}; the end of {self.log_file}:\n"
                    + self.last_log_lines()
                )
                return
            await asyncio.sleep(RESTART_S)
            self.restarts += 1
            await self._spawn()
