"""Turn a run's output into statements for `/feedback`: by a program, or by the task's answer."""

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pawl.judging.answers import JudgeError, Statement, read_verdict
from pawl.judging.program import ProgramJudge
from pawl.rollout.tasks import RolloutError, Task
from store.records import REWARD

# Relative and absolute tolerance of numbers.
TOLERANCE: Final = 1e-6


class RunJudge:
    """Judges the runs that did not fail; this base class makes no statements about them."""

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Return the statements about a run, possibly none.

        Raises:
            JudgeFailed: the judge gave no usable answer.
        """
        return []


class AnswerJudge(RunJudge):
    """Rewards 1 if the last line of a run's output is the answer in a field of its task, else 0."""

    def __init__(self, field: str) -> None:
        self._field = field

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        value = score_answer(output, task.fields[self._field])
        return [{"metric": REWARD, "value": value, "episode": episode}]


class CommandJudge(RunJudge):
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
        given = msgspec.json.encode({"task": task.fields, "output": output, "episode": episode})
        return read_verdict(await self._program.answer(given), episode)


def score_answer(output: str, expected: Any) -> float:
    """Return 1.0 if the last line of an output is the expected answer, else 0.0.

    If `expected` is a list, each of its items is right. Numbers are compared as numbers, texts
    without regard to case and spacing.
    """
    last_line = output.strip().rpartition("\n")[2]
    answers = expected if isinstance(expected, list) else [expected]
    return float(any(_is_answer(last_line, answer) for answer in answers))


def _is_answer(text: str, answer: Any) -> bool:
    if isinstance(answer, dict | list | bool) or answer is None:
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return False
        # In Python, 1 == True.
        return type(document) is type(answer) and bool(document == answer)
    number, right = _parse_number(text), _parse_number(str(answer))
    if number is not None and right is not None:
        return math.isclose(number, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return _normalised_text(text) == _normalised_text(str(answer))


def _parse_number(text: str) -> float | None:
    """Parse a number, ignoring spaces, commas and a final full stop; None if `text` is not one."""
    try:
        number = float(text.strip().removesuffix(".").replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _normalised_text(text: str) -> str:
    return " ".join(text.split()).removesuffix(".").casefold()
