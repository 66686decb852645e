"""A learner of several processes: rank 0 is told what to do and tells the others."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from trainer.errors import TrainerError
from trainer.learners.learner import Learner
from trainer.learners.processes import Processes
from trainer.rows import Row

log = structlog.get_logger()


def is_follower() -> bool:
    """Whether this process was started to do as rank 0 says."""
    return int(os.environ.get("RANK", "0")) > 0


class LeadingLearner:
    """A `LearnerProtocol` whose every method is done in all processes at once."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._processes = learner.processes
        # One method at a time: what the processes say to each other must not interleave.
        self._lock = threading.Lock()

    def interrupt(self) -> None:
        """See `Learner.interrupt`."""
        self._learner.interrupt()

    def restore(self, adapter: Path | None) -> None:
        """See `Learner.restore`."""
        self._run_everywhere("restore", adapter)

    def update(self, rows: Sequence[Row]) -> dict[str, Any]:
        """See `Learner.update`."""
        found: dict[str, Any] = self._run_everywhere("update", rows)
        return found

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """See `Learner.logprobs`."""
        found: list[list[float]] = self._run_everywhere("logprobs", rows)
        return found

    def save(self, folder: Path) -> None:
        """See `Learner.save`; the files are the leader's."""
        self._run_everywhere("save", folder)

    def saved_as(self, adapter: Path) -> None:
        """See `Learner.saved_as`."""
        self._run_everywhere("saved_as", adapter)

    def stop(self) -> None:
        """Let the others end, once what is under way is done."""
        with self._lock:
            self._processes.broadcast(None)

    def _run_everywhere(self, name: str, argument: object) -> Any:
        with self._lock:
            self._processes.broadcast((name, argument))
            return getattr(self._learner, name)(argument)


def follow(learner: Learner) -> None:
    """Do as the leader says until it says stop.

    What fails fails in every process alike; it is the leader who tells of it.
    """
    processes: Processes = learner.processes
    while (told := processes.broadcast(None)) is not None:
        name, argument = told
        method: Callable[[Any], Any] = getattr(learner, name)
        try:
            method(argument)
        except TrainerError as error:
            log.debug("follower_failed", method=name, reason=str(error))
