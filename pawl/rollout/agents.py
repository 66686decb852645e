"""Run an agent on one task: as a program for each run, or as a Python function."""

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from pawl.programs import TooMuchOutput, last_line, run_program, without_pawl_settings
from pawl.rollout.function_host import KEPT_ERRORS, MAX_OUTPUT
from pawl.rollout.tasks import RolloutError
from store.records import Record, Split

# Linux refuses a single variable of more than 128 KiB.
MAX_VARIABLE_BYTES: Final = 100_000


class Request(Record, frozen=True, kw_only=True):
    """The input of one run: task fields that the agent may see, variables, time limit."""

    task: dict[str, Any]
    environment: dict[str, str]
    limit_s: float


class Result(Record, frozen=True, kw_only=True):
    """The result of one run.

    `error` is the kind of failure (None: success) and `detail` its message; `errors` is the end of
    standard error.
    """

    output: str = ""
    error: str | None = None
    detail: str = ""
    status: int | None = None
    errors: str = ""


class Agent:
    """Runs an agent, once for each request (abstract)."""

    async def start(self) -> None:
        """Check that the agent can be run, or raise RolloutError."""

    async def stop(self) -> None:
        """End everything that was started."""

    async def run(self, request: Request) -> Result:
        """Run the agent once, within the request's time limit."""
        raise NotImplementedError


class CommandAgent(Agent):
    """Runs a program, in any language, as a new process for each run."""

    def __init__(self, command: Sequence[str]) -> None:
        """Store the program and its arguments.

        Raises:
            RolloutError: there is no such program.
        """
        if not command or shutil.which(command[0]) is None:
            shown = command[0] if command else ""
            raise RolloutError(
                f"the program {shown!r} is not found or not executable: give its path, "
                "or `chmod +x` it"
            )
        self._command = list(command)

    async def run(self, request: Request) -> Result:
        """Run the program with the task on standard input; its standard output is the output."""
        try:
            ended = await run_program(
                self._command,
                msgspec.json.encode(request.task) + b"\n",
                limit_s=request.limit_s,
                most_bytes=MAX_OUTPUT,
                environment=without_pawl_settings(os.environ) | request.environment,
            )
        except TimeoutError:
            return time_limit_result(request.limit_s)
        except TooMuchOutput as error:
            return Result(error="too much output", detail=str(error))
        except OSError as error:
            return Result(error="not started", detail=str(error))
        errors = ended.errors.decode(errors="replace")
        return Result(
            # A shell's `$(…)` strips newlines at the end too.
            output=ended.output.decode(errors="replace").rstrip("\n"),
            error=_failure_kind(ended.status),
            detail=last_line(errors) if ended.status else "",
            status=ended.status,
            errors=errors[-KEPT_ERRORS:],
        )


def time_limit_result(limit_s: float) -> Result:
    """Return the result of a run that took too long."""
    return Result(error="time limit", detail=f"not done within {limit_s:g} s")


def _failure_kind(status: int) -> str | None:
    """Return a failure's kind from an exit status; None for 0."""
    if status >= 0:
        return f"exit status {status}" if status else None
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def run_url(url: str, *, task: str | None, episode: str, split: Split | None) -> str:
    """Return the proxy's base URL for a run, without `/v1`; a name that is None is left out."""
    named = url if task is None else f"{url}/task/{quote(task, safe='')}"
    named += f"/episode/{quote(episode, safe='')}"
    return named if split is None else f"{named}/split/{split}"


def run_environment(
    base_url: str,
    *,
    model: str | None = None,
    given: Mapping[str, str],
    names: Mapping[str, str] | None = None,
    task: bytes = b"",
) -> dict[str, str]:
    """Return the variables to set for a run, in addition to the inherited ones (`given`).

    Inherited API keys are kept. `names` become variables with the prefix `ROLLOUT_`. A task too
    long for a variable is left out.
    """
    # Anthropic's SDK adds /v1 itself.
    variables = {"OPENAI_BASE_URL": f"{base_url}/v1", "ANTHROPIC_BASE_URL": base_url}
    # SDKs refuse to make calls without a key.
    if not given.get("OPENAI_API_KEY"):
        variables["OPENAI_API_KEY"] = "unused"
    if not (given.get("ANTHROPIC_API_KEY") or given.get("ANTHROPIC_AUTH_TOKEN")):
        variables["ANTHROPIC_API_KEY"] = "unused"
    if model is not None:
        variables |= {"OPENAI_MODEL": model, "ANTHROPIC_MODEL": model}
    variables |= {f"ROLLOUT_{name}": value for name, value in (names or {}).items()}
    if 0 < len(task) <= MAX_VARIABLE_BYTES and b"\0" not in task:
        variables["ROLLOUT_TASK"] = task.decode()
    return variables
