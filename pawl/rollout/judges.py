"""What turns a run's output into statements: a program, a field of the task, or nothing."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pawl.judging.errors import JudgeError
from pawl.judging.program import ProgramJudge
from pawl.rollout.errors import RolloutError
from pawl.rollout.journal import Statement
from pawl.rollout.tasks import Task
from pawl.rollout.verdicts import compare, read_verdict
from store.records import REWARD


class RunJudge(Protocol):
    """The interface of what scores a run that did not fail."""

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Return the statements about a run; an empty list if there is nothing to say.

        Raises:
            JudgeFailed: the judge gave no usable answer.
        """


class NoJudge:
    """Says nothing: rewards come from elsewhere, or not at all."""

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Return no statement."""
        return []


class AnswerJudge:
    """Compares the last line of the output with a field of the task."""

    def __init__(self, field: str) -> None:
        """Store the name of the field."""
        self._field = field

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Return a reward of 1 or 0."""
        value = compare(output, task.fields[self._field])
        return [{"metric": REWARD, "value": value, "episode": episode}]


class CommandJudge:
    """Runs a program for each run: task and output in, a number or metrics out."""

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        """Store the program and its time limit.

        Raises:
            RolloutError: there is no such program.
        """
        try:
            self._program = ProgramJudge(command, timeout_s=limit_s)
        except JudgeError as error:
            raise RolloutError(f"--judge: {error}") from error

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Run the program, and return what it says.

        Raises:
            JudgeFailed: it did not end well, or said nothing usable.
        """
        told = {"task": task.fields, "output": output, "episode": episode}
        return read_verdict(await self._program.answer(msgspec.json.encode(told)), episode)
