"""Set up a rollout from a user's options: tasks, agent, judge and proxy."""

import asyncio
import math
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from pawl.judging.feedback import FeedbackClient
from pawl.rollout.agents import Agent, CommandAgent
from pawl.rollout.functions import FunctionAgent
from pawl.rollout.journal import Ended, Journal, RolloutPlan, RunKey
from pawl.rollout.judges import AnswerJudge, CommandJudge, RunJudge
from pawl.rollout.proxy import ProxyClient
from pawl.rollout.running import Job, Rollout
from pawl.rollout.tasks import RolloutError, Task, parse_tasks
from store.limited_bodies import LimitedResponse
from store.records import Record


class Setup(Record, frozen=True, kw_only=True):
    """Options of a rollout: which agent runs which tasks, what scores the runs, and where.

    The agent is a `command`, as in a shell, or a `python` function MODULE:FUNCTION. A run is scored
    by the program `judge` or by its task's field `answer`; only the judge sees the fields in
    `hide`. `limit_s` is the time limit of one run, `at_once` the number of concurrent runs.
    `headers` are sent with every request to the proxy at `url`.
    """

    tasks: Path
    journal: Path
    url: str
    headers: Mapping[str, str] = {}
    command: str | None = None
    python: str | None = None
    judge: str | None = None
    answer: str | None = None
    hide: tuple[str, ...] = ()
    limit_s: float = 600.0
    at_once: int = 16

    @property
    def agent_name(self) -> str:
        """Return the agent's name in a journal."""
        return self.command or f"python {self.python}"

    @property
    def judge_name(self) -> str:
        """Return the judge's name in a journal; empty if there is none."""
        return self.judge or (f"answer {self.answer}" if self.answer else "")

    def read_tasks(self) -> tuple[Task, ...]:
        """Return the tasks of the file.

        Raises:
            RolloutError: the file cannot be read or used, or is also the journal.
        """
        file, journal = self.tasks, self.journal
        if not journal.name:
            raise RolloutError(
                f"--journal: {journal} cannot be opened: it is a folder; name a file"
            )
        if os.path.realpath(file) == os.path.realpath(journal):
            raise RolloutError(f"--tasks and --journal would be one file, {journal}: name another")
        try:
            text = file.read_bytes()
        except OSError as error:
            raise RolloutError(f"--tasks: {file} cannot be read: {error}") from error
        return parse_tasks(text, str(file), self.answer, self.hide)

    def make_agent(self) -> Agent:
        """Return the agent, not started yet.

        Raises:
            RolloutError: not exactly one agent is given, or there is no such program.
        """
        if (self.command is None) == (self.python is None):
            raise RolloutError(
                "say what to run with `-- PROGRAM ARGUMENTS` at the end, or --python"
                " MODULE:FUNCTION, one of the two"
            )
        if self.python is not None:
            log = self.journal.with_suffix(".log").absolute()
            return FunctionAgent(self.python, log, self.at_once, folder=Path.cwd())
        return CommandAgent(_split_command("the program", self.command or ""))

    def make_judge(self) -> RunJudge:
        """Return the judge; without `judge` and `answer` it makes no statements.

        Raises:
            RolloutError: both are given, or there is no such program.
        """
        if self.judge is not None and self.answer is not None:
            raise RolloutError("--judge and --answer both score a run: give one of them")
        if self.judge is not None:
            return CommandJudge(_split_command("--judge", self.judge), self.limit_s)
        return RunJudge() if self.answer is None else AnswerJudge(self.answer)

    @asynccontextmanager
    async def rollout(
        self,
        tasks: tuple[Task, ...],
        plan: RolloutPlan,
        *,
        runs: Sequence[RunKey] | None = None,
        again: bool = False,
        on_end: Callable[[RunKey, Ended], None] = lambda key, ended: None,
    ) -> AsyncIterator[Rollout]:
        """Yield a rollout of the plan's runs, or of `runs`; its journal is open, its agent started.

        With `again`, runs that failed or were not judged are repeated.

        Raises:
            RolloutError: the options cannot be used, or no proxy answers.
        """
        judge, agent = self.make_judge(), self.make_agent()
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            timeout=timeout, headers=self.headers, response_class=LimitedResponse
        ) as session:
            proxy = ProxyClient(session, self.url)
            models = await proxy.models()
            for model in filter(None, (plan.policy, plan.against)):
                if not models.has(model):
                    known = ", ".join(sorted(models.names)) or "none"
                    raise RolloutError(f"the proxy has no {model!r}; its models are {known}")
            feedback = FeedbackClient(session, f"{self.url}/feedback", patience_s=math.inf)
            journal = Journal(self.journal, again=again)
            try:
                journal.begin(plan)
                job = Job(
                    url=self.url,
                    tasks=tasks,
                    plan=plan,
                    limit_s=self.limit_s,
                    at_once=self.at_once,
                    hidden=frozenset({*self.hide, *filter(None, [self.answer])}),
                    runs=None if runs is None else tuple(runs),
                )
                watching = asyncio.create_task(proxy.watch())
                try:
                    await agent.start()
                    yield Rollout(job, agent, judge, journal, feedback, proxy, on_end=on_end)
                finally:
                    watching.cancel()
                    await asyncio.wait([watching])
                    await agent.stop()
            finally:
                journal.close()


def _split_command(option: str, command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise RolloutError(
            f"{option} cannot be split into words ({error}): quote it as in a shell"
        ) from error
