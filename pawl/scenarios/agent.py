"""Run a scenario's agent and judge as `pawl rollout` does, and collect the results."""

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Final

import aiohttp

from pawl.judging.answers import JudgeFailed, Statement, metrics_of, read_verdict
from pawl.judging.feedback import FeedbackClient
from pawl.rollout.agents import Request
from pawl.rollout.functions import CoroutineAgent, FunctionAgent
from pawl.rollout.journal import Ended, Journal, RolloutPlan, RunKey
from pawl.rollout.judges import RunJudge
from pawl.rollout.proxy import ProxyClient
from pawl.rollout.running import Job, Rollout
from pawl.rollout.tasks import RolloutError, Task, tasks_digest
from pawl.scenarios.scenario import Scenario, ScenarioFailed, framework_remedy, interpreter
from store.records import Record, Split
from store.tenants import task_family

JUDGE_S: Final = 60.0


class FunctionJudge(RunJudge):
    """Judges runs by a Python function, one after the other."""

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        """Store the function as MODULE:FUNCTION, its folder, and the log of its output."""
        self.function = FunctionAgent(name, log, 1, option="the judge", folder=folder)

    async def judge(self, task: Task, episode: str, output: str) -> list[Statement]:
        """Call the function, and return its statements.

        Raises:
            JudgeFailed: the function raised, took too long, or returned nothing usable.
        """
        given = {"task": task.fields, "output": output, "episode": episode}
        result = await self.function.run(Request(task=given, environment={}, limit_s=JUDGE_S))
        if result.error is not None:
            raise JudgeFailed(f"{result.error}: {result.detail}")
        return read_verdict(result.output.encode(), episode)


class RunResult(Record, frozen=True, kw_only=True):
    """The result of an agent's run, the `sample`-th of its task.

    `output` is what the agent returned, `error` why it failed, or None; `metrics` are the judge's.
    """

    task: str
    sample: int
    output: str
    error: str | None
    metrics: dict[str, float]


class WorkingAgent:
    """Runs a scenario's agent on tasks, has the runs judged, and collects the results."""

    def __init__(self, scenario: Scenario, url: str, folder: Path, *, name: str = "train") -> None:
        """Store the proxy's address, without `/v1`, and the folder of journals and logs.

        The names of journals begin with `name`.

        Raises:
            ScenarioFailed: the Python that runs the agent is missing.
        """
        self._scenario = scenario
        self._url = url
        self._folder = folder
        self._name = name
        log = (folder / "agent.log").absolute()
        self._agent = CoroutineAgent(interpreter(scenario), scenario.agent, scenario.folder, log)
        self._judge = FunctionJudge(scenario.judge, scenario.folder, log)
        self._numbers = itertools.count(1)
        self._rollouts: list[tuple[Rollout, asyncio.Task[None]]] = []
        self._uncollected: list[RunResult] = []
        self._unjudged: str | None = None
        self.results: list[RunResult] = []

    async def start(self, *, samples: int, concurrency: int, split: Split | None = None) -> None:
        """Start agent and judge; each task is run `samples` times, `concurrency` at a time.

        Raises:
            ScenarioFailed: agent or judge cannot be run.
        """
        self._samples, self._concurrency, self._split = samples, concurrency, split
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            await self._agent.start()
            await self._judge.function.start()
        except RolloutError as error:
            await self.stop()
            remedy = framework_remedy(self._scenario) if self._scenario.python != "pawl" else ""
            raise ScenarioFailed(f"{error}. {remedy}".removesuffix(". ")) from error

    def ask(self, tasks: Sequence[Task]) -> None:
        """Begin the runs of these tasks, as a rollout with a journal of its own."""
        plan = RolloutPlan(
            tasks=tasks_digest(tuple(tasks)),
            samples=self._samples,
            agent=self._scenario.agent,
            judge=self._scenario.judge,
            split=self._split,
            policy=self._scenario.requested_model,
        )
        job = Job(
            url=self._url,
            tasks=tuple(tasks),
            plan=plan,
            at_once=self._concurrency,
            hidden=frozenset({self._scenario.answer}),
        )
        path = self._folder / f"{self._name}-{next(self._numbers)}.rollout.jsonl"
        path.unlink(missing_ok=True)
        journal = Journal(path)
        rollout = Rollout(
            job,
            self._agent,
            self._judge,
            journal,
            FeedbackClient(self._session, f"{self._url}/feedback", patience_s=math.inf),
            ProxyClient(self._session, self._url),
            on_end=self._add_result,
        )
        working = asyncio.create_task(self._run_rollout(rollout, journal, plan))
        self._rollouts.append((rollout, working))

    async def _run_rollout(self, rollout: Rollout, journal: Journal, plan: RolloutPlan) -> None:
        try:
            journal.begin(plan)
            await rollout.run()
        finally:
            journal.close()

    def _add_result(self, key: RunKey, ended: Ended) -> None:
        if ended.outcome == "unjudged":
            self._unjudged = ended.detail
        failed = ended.error is not None
        self._uncollected.append(
            RunResult(
                task=key.task,
                sample=key.sample,
                output=ended.output,
                error=f"{ended.error}: {ended.detail}" if failed else None,
                metrics={} if failed else metrics_of(ended.statements),
            )
        )

    def collect(self) -> list[RunResult]:
        """Return the results since the last call.

        Raises:
            ScenarioFailed: the agent or the judge cannot go on.
        """
        for _, working in self._rollouts:
            if working.done() and not working.cancelled() and (error := working.exception()):
                raise ScenarioFailed(f"the agent cannot go on: {error}") from error
        if self._unjudged is not None:
            raise ScenarioFailed(f"the judge failed: {self._unjudged}")
        new, self._uncollected = self._uncollected, []
        self.results += new
        return new

    async def finish(self) -> None:
        """Wait until all tasks are done, and all rewards are accepted."""
        if self._rollouts:
            await asyncio.wait([working for _, working in self._rollouts])

    async def stop(self) -> None:
        """Give up unfinished runs, and end agent and judge."""
        for rollout, working in self._rollouts:
            if not working.done():
                rollout.give_up()
            with suppress(RolloutError):
                await working
        await self._agent.stop()
        await self._judge.function.stop()
        await self._session.close()


class HeldOutResults(Record, frozen=True, kw_only=True):
    """Results of the held-out tasks: all runs, their mean score, and that of each family."""

    score: float | None
    families: dict[str, float]
    results: list[RunResult]

    @property
    def failed(self) -> int:
        """Return the number of failed runs."""
        return sum(result.error is not None for result in self.results)


async def run_held_out(
    scenario: Scenario, url: str, tasks: Sequence[Task], folder: Path, *, name: str
) -> HeldOutResults:
    """Evaluate the agent on the held-out tasks, and return the results.

    The journal NAME-1.rollout.jsonl in `folder` has all results.

    Raises:
        ScenarioFailed: the agent or the judge failed.
    """
    agent = WorkingAgent(scenario, url, folder, name=name)
    await agent.start(samples=scenario.held_out_samples, concurrency=scenario.at_once, split="eval")
    try:
        agent.ask(tasks)
        await agent.finish()
        results = agent.collect()
    finally:
        await agent.stop()
    scores = defaultdict[str, list[float]](list)
    for result in results:
        if scenario.score in result.metrics:
            scores[task_family(result.task)].append(result.metrics[scenario.score])
    all_scores = [score for of_family in scores.values() for score in of_family]
    return HeldOutResults(
        score=round(fmean(all_scores), 4) if all_scores else None,
        families={name: round(fmean(values), 4) for name, values in sorted(scores.items())},
        results=results,
    )
