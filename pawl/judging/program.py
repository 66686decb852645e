"""A program as judge: an episode a run, one JSON line in, its answer out."""

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

LAST_WORDS: Final = 300


class ProgramJudge:
    """Runs a command for each episode."""

    def __init__(self, command: Sequence[str], *, timeout_s: float, name: str | None = None):
        """Raises `JudgeError` where there is no such program."""
        if not command or shutil.which(command[0]) is None:
            shown = command[0] if command else ""
            raise JudgeError(f"no program {shown!r} is found, or it may not be run: name one")
        self.name = name or shlex.join(command)
        self._command = list(command)
        self._timeout_s = timeout_s

    async def judge(self, episode: str, line: bytes) -> list[Statement]:
        """See `Judge`."""
        return read_answer(await self._answer(line), episode)

    async def _answer(self, line: bytes) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
            )
        except OSError as error:
            raise JudgeFailed(f"it cannot be started: {error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, complaint = await process.communicate(line + b"\n")
        except TimeoutError as error:
            raise JudgeFailed(f"no answer within {self._timeout_s:g} s") from error
        finally:
            # What it started may outlive it, and hold its output open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise JudgeFailed(f"exit code {process.returncode}{_last_words(complaint)}")
        return answer


def _last_words(complaint: bytes) -> str:
    words = complaint.decode(errors="replace").strip().rpartition("\n")[2]
    return f": {words[-LAST_WORDS:]}" if words else ""
