"""Judge by a program that runs for each episode: one JSON line in, its answer out."""

import asyncio
import os
import shlex
import shutil
import signal
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from pawl.judging.answers import Statement, read_answer
from pawl.judging.errors import JudgeError, JudgeFailed

LAST_LINE_CHARS: Final = 300


class ProgramJudge:
    """Run a command for each episode, and read its answer from standard output."""

    def __init__(self, command: Sequence[str], *, timeout_s: float, name: str | None = None):
        """Store the command, after a check that its program exists.

        Args:
            command: the program and its arguments.
            timeout_s: time limit of one run, in seconds.
            name: the judge's name; None: the command.

        Raises:
            JudgeError: there is no such program, or it is not executable.
        """
        if not command or shutil.which(command[0]) is None:
            shown = command[0] if command else ""
            raise JudgeError(
                f"the judge's program {shown!r} is not found or not executable: give its path, "
                "or `chmod +x` it"
            )
        self.name = name or shlex.join(command)
        self._command = list(command)
        self._timeout_s = timeout_s

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """Run the program with the line on standard input, and return its statements.

        Raises:
            JudgeFailed: it cannot be started, takes too long, ends with a status other than 0,
                or prints no usable answer.
        """
        return read_answer(await self._answer(line), episode)

    async def _answer(self, line: bytes) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
            )
        except OSError as error:
            raise JudgeFailed(f"the judge's program cannot be started: {error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, errors = await process.communicate(line + b"\n")
        except TimeoutError as error:
            raise JudgeFailed(f"no answer within {self._timeout_s:g} s") from error
        finally:
            # Kill the group: children of the program may outlive it and hold its output open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise JudgeFailed(f"exit code {process.returncode}{_last_line(errors)}")
        return answer


def _last_line(errors: bytes) -> str:
    """Return the last line of standard error, as the end of a message."""
    line = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return f": {line[-LAST_LINE_CHARS:]}" if line else ""
