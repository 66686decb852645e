"""Define the interface of what runs an agent, and hold what became of a run."""

import signal
from typing import Any, Final, Protocol

from pawl.rollout.addresses import Request
from store.records import Record

KEPT_ERRORS: Final = 2000


class Result(Record, frozen=True, kw_only=True):
    """Tell what became of one run: `error` is None if it did its work, else its failure's kind.

    `value` is what a Python agent returned, before it became text.
    """

    output: str = ""
    error: str | None = None
    detail: str = ""
    status: int | None = None
    errors: str = ""
    value: Any = None


class Agent(Protocol):
    """Define the interface of an agent that can be run."""

    async def run(self, request: Request) -> Result:
        """Run the agent once, within the request's time limit.

        Raises:
            RunLost: the run ended through no fault of its own.
            WorkerCrashed: it may have crashed the process that it shared; run it alone.
        """

    async def start(self, at_once: int) -> None:
        """Prepare for so many runs at once.

        Raises:
            RolloutError: the agent cannot be run.
        """

    async def stop(self) -> None:
        """End all that was started."""


def out_of_time(limit_s: float) -> Result:
    """Return the result of a run that took too long."""
    return Result(error="time limit", detail=f"not done within {limit_s:g} s")


def status_words(status: int) -> str | None:
    """Return a failure's kind from an exit status; None for 0."""
    if status == 0:
        return None
    if status > 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
