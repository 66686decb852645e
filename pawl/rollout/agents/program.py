"""Run an agent as a program of its own for each run, in any language."""

import os
import shutil
from collections.abc import Sequence

from pawl.programs import TooMuchOutput, last_line, not_ours, run_program
from pawl.rollout.addresses import Request, as_json
from pawl.rollout.agents.agent import KEPT_ERRORS, Result, out_of_time, status_words
from pawl.rollout.agents.worker import MOST_OUTPUT
from pawl.rollout.errors import RolloutError


class CommandAgent:
    """Start a program, in any language, once for each run."""

    def __init__(self, command: Sequence[str]) -> None:
        """Store the program and its arguments.

        Raises:
            RolloutError: there is no such program.
        """
        if not command or shutil.which(command[0]) is None:
            shown = command[0] if command else ""
            raise RolloutError(
                f"--command: the program {shown!r} is not found or not executable: give its path, "
                "or `chmod +x` it"
            )
        self._command = list(command)

    async def start(self, at_once: int) -> None:
        """Do nothing: each run starts its own program."""

    async def stop(self) -> None:
        """Do nothing: a run that is cancelled ends its own program."""

    async def run(self, request: Request) -> Result:
        """Run the program with the task on standard input; its standard output is the output."""
        try:
            ended = await run_program(
                self._command,
                as_json(request.task) + b"\n",
                limit_s=request.limit_s,
                most_bytes=MOST_OUTPUT,
                environment=not_ours(os.environ) | request.environment,
            )
        except TimeoutError:
            return out_of_time(request.limit_s)
        except TooMuchOutput as error:
            return Result(error="too much output", detail=str(error))
        except OSError as error:
            return Result(error="not started", detail=str(error))
        # As `$(…)` of a shell does: what a function returns has no line's end either.
        output = ended.output.decode(errors="replace").rstrip("\n")
        errors = ended.errors.decode(errors="replace")
        return Result(
            output=output,
            error=status_words(ended.status),
            detail=last_line(errors) if ended.status else "",
            status=ended.status,
            errors=errors[-KEPT_ERRORS:],
        )
