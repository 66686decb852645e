"""Turn a run's output into statements: by a program, a function, or a field of the task."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from pawl.judging.answers import Statement
from pawl.judging.errors import JudgeError, JudgeFailed
from pawl.judging.program import ProgramJudge
from pawl.rollout.addresses import Request
from pawl.rollout.agents.warm import WarmWorker
from pawl.rollout.errors import RolloutError
from pawl.rollout.tasks import Task
from pawl.rollout.verdicts import compare, read_verdict
from store.records import REWARD


class RunJudge:
    """Score a run that did not fail; as it is, this says nothing of any."""

    async def start(self) -> None:
        """Prepare to judge.

        Raises:
            RolloutError: the judge cannot be run.
        """

    async def stop(self) -> None:
        """End all that was started."""

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Return the statements about a run; an empty list if there is nothing to say.

        Raises:
            JudgeFailed: the judge gave no usable answer.
        """
        return []


class AnswerJudge(RunJudge):
    """Compare the last line of the output with a field of the task."""

    def __init__(self, field: str) -> None:
        """Store the name of the field."""
        self._field = field

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Return a reward of 1 or 0."""
        value = compare(output, task.fields[self._field])
        return [{"metric": REWARD, "value": value, "episode": episode}]


class CommandJudge(RunJudge):
    """Run a program for each run: task and output in, a number or metrics out."""

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
        shown = msgspec.json.encode(_told(task, episode, output))
        return read_verdict(await self._program.answer(shown), episode)


class PythonJudge(RunJudge):
    """Have a Python function, which one worker imports once, judge one run after another."""

    def __init__(self, worker: WarmWorker, limit_s: float) -> None:
        """Store the worker, and the time limit of one judgement."""
        self._worker = worker
        self._limit_s = limit_s
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        """Import the function.

        Raises:
            RolloutError: it cannot be imported.
        """
        await self._worker.ready()

    async def stop(self) -> None:
        """End the worker."""
        await self._worker.kill()

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Call the function, and return what it says.

        Raises:
            JudgeFailed: it raised, took too long, or said nothing usable.
        """
        request = Request(
            episode=episode,
            task=_told(task, episode, output),
            base_url="",
            model=None,
            environment={},
            limit_s=self._limit_s,
        )
        async with self._one_at_a_time:
            result = await self._worker.run(request)
        if result.error is not None:
            raise JudgeFailed(f"{result.error}: {result.detail}")
        return read_verdict(msgspec.json.encode(result.value), episode)


def _told(task: Task, episode: str, output: str) -> dict[str, Any]:
    """Return what a judge is told of a run, the answer included."""
    return {"task": task.fields, "output": output, "episode": episode}
