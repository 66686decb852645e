"""Judge by a program that runs for each episode: its export line in, statements out."""

import shlex
import shutil
from collections.abc import Sequence

from pawl.judging.answers import MAX_ANSWER, JudgeError, JudgeFailed, Statement, read_answer
from pawl.programs import TooMuchOutput, last_line, run_program


class ProgramJudge:
    """Run a command for each episode, and read the statements that it prints."""

    def __init__(self, command: Sequence[str], *, timeout_s: float, name: str | None = None):
        """Store the command; it is also the judge's name unless `name` is given.

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
        """Return the statements that the program prints about an episode.

        Raises:
            JudgeFailed: the program fails (see `answer`), or prints no usable statements.
        """
        return read_answer(await self.answer(line), episode)

    async def answer(self, line: bytes) -> bytes:
        """Run the program with `line` on standard input, and return its standard output.

        Raises:
            JudgeFailed: the program cannot be started, takes too long, prints too much, or ends
                with a status other than 0.
        """
        try:
            ended = await run_program(
                self._command, line + b"\n", limit_s=self._timeout_s, most_bytes=MAX_ANSWER
            )
        except TimeoutError as error:
            raise JudgeFailed(f"no answer within {self._timeout_s:g} s") from error
        except OSError as error:
            raise JudgeFailed(f"the judge's program cannot be started: {error}") from error
        except TooMuchOutput as error:
            raise JudgeFailed(str(error)) from error
        if ended.status:
            last_error = last_line(ended.errors)
            raise JudgeFailed(f"exit code {ended.status}{f': {last_error}' if last_error else ''}")
        return ended.output
