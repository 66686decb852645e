"""Run a scenario's agent and its judge as `pawl rollout` runs any agent, and keep the results."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import aiohttp

from pawl.rollout.agents.agent import Result
from pawl.rollout.agents.warm import Function, WarmAgent, WarmWorker
from pawl.rollout.attempts import Job
from pawl.rollout.desk import Desk
from pawl.rollout.errors import RolloutError
from pawl.rollout.journal import Finished, Key, Plan
from pawl.rollout.journal_file import JournalFile
from pawl.rollout.judges import PythonJudge
from pawl.rollout.proxy_view import ProxyView
from pawl.rollout.running import Rollout
from pawl.rollout.tasks import Task, digest
from pawl.rollout.verdicts import metrics_of
from pawl.scenarios.errors import ScenarioFailed
from pawl.scenarios.places import interpreter, missing_framework
from pawl.scenarios.scenario import Scenario
from store.records import Record, Split

JUDGE_S: Final = 60.0


class Ran(Record, frozen=True, kw_only=True):
    """Hold what came of one run of the agent.

    Attributes:
        task: the name of its task.
        sample: its number among the runs of that task.
        value: what the agent returned; None if it failed.
        error: why it failed; None if it did not.
        metrics: what the judge says of it, by metric.
    """

    task: str
    sample: int
    value: Any
    error: str | None
    metrics: dict[str, float]


class WorkingAgent:
    """Keep a scenario's agent and its judge warm, and give them tasks.

    Attributes:
        results: all results collected so far.
    """

    def __init__(self, scenario: Scenario, url: str, folder: Path, *, name: str = "train") -> None:
        """Store where the agent works, and where its files go.

        Args:
            scenario: whose agent and judge.
            url: the proxy's address, without `/v1`.
            folder: where journals and logs are written.
            name: what the files are called by.

        Raises:
            ScenarioFailed: the Python that runs the agent is missing.
        """
        self._scenario = scenario
        self._url = url
        self._folder = folder
        self._name = name
        log = folder / "agent.log"
        function = Function(
            name=scenario.agent,
            log_file=log,
            folder=scenario.folder,
            model_is_told=bool(scenario.asks_for),
            interpreter=interpreter(scenario),
        )
        self._agent = WarmAgent(function)
        judge = Function(
            option="the judge", name=scenario.judge, log_file=log, folder=scenario.folder
        )
        self._judge = PythonJudge(WarmWorker(judge), JUDGE_S)
        self._numbers = itertools.count(1)
        self._rollouts: list[tuple[Rollout, asyncio.Task[None]]] = []
        self._fresh: list[Ran] = []
        self._unjudged: str | None = None
        self.results: list[Ran] = []

    async def start(self, *, samples: int, concurrency: int, split: Split | None = None) -> None:
        """Start both; each task is run `samples` times, `concurrency` at a time.

        Raises:
            ScenarioFailed: one of them cannot be run.
        """
        self._samples, self._concurrency, self._split = samples, concurrency, split
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            await self._agent.start(concurrency)
            await self._judge.start()
        except RolloutError as error:
            await self.stop()
            remedy = missing_framework(self._scenario) if self._scenario.python != "pawl" else ""
            raise ScenarioFailed(f"{error}. {remedy}".removesuffix(". ")) from error

    def ask(self, tasks: Sequence[Task]) -> None:
        """Give tasks to the agent."""
        job = Job(
            url=self._url,
            tasks=tuple(tasks),
            samples=self._samples,
            policies=(self._scenario.asks_for,),
            split=self._split,
            at_once=self._concurrency,
            hidden=frozenset({self._scenario.answer}),
        )
        journal = self._journal()
        rollout = Rollout(
            job,
            self._agent,
            self._judge,
            journal,
            Desk(self._session, f"{self._url}/feedback"),
            ProxyView(self._session, self._url, f"{self._url}/metrics"),
            on_end=self._take,
        )
        plan = Plan(
            tasks=digest(job.tasks),
            samples=job.samples,
            agent=self._scenario.agent,
            judge=self._scenario.judge,
            split=job.split,
            policies=job.policies,
        )
        working = asyncio.create_task(self._work(rollout, journal, plan))
        self._rollouts.append((rollout, working))

    def _journal(self) -> JournalFile:
        path = self._folder / f"{self._name}-{next(self._numbers)}.rollout.jsonl"
        path.unlink(missing_ok=True)
        return JournalFile(path)

    async def _work(self, rollout: Rollout, journal: JournalFile, plan: Plan) -> None:
        try:
            await rollout.run(journal.open_plan(plan))
        finally:
            journal.close()

    def _take(self, key: Key, finished: Finished, result: Result) -> None:
        if finished.outcome == "abandoned":
            return
        if finished.outcome == "unjudged":
            self._unjudged = finished.detail
        failed = finished.error is not None
        self._fresh.append(
            Ran(
                task=key.task,
                sample=key.sample,
                value=None if failed else result.value,
                error=f"{finished.error}: {finished.detail}" if failed else None,
                metrics={} if failed else metrics_of(finished.statements),
            )
        )

    def collect(self) -> list[Ran]:
        """Return the results that came since the last call.

        Raises:
            ScenarioFailed: the agent or the judge cannot go on.
        """
        for _, working in self._rollouts:
            if working.done() and not working.cancelled() and (error := working.exception()):
                raise ScenarioFailed(f"the agent cannot go on: {error}") from error
        if self._unjudged is not None:
            raise ScenarioFailed(f"the judge failed: {self._unjudged}")
        new, self._fresh = self._fresh, []
        self.results += new
        return new

    async def finish(self) -> None:
        """Wait until all that was asked is answered, and all rewards are taken."""
        if self._rollouts:
            await asyncio.wait([working for _, working in self._rollouts])

    async def stop(self) -> None:
        """Give up what is under way, and end agent and judge."""
        for rollout, working in self._rollouts:
            if not working.done():
                rollout.stop()
                rollout.stop()
            with suppress(RolloutError):
                await working
        await self._agent.stop()
        await self._judge.stop()
        await self._session.close()


class Exam(Record, frozen=True, kw_only=True):
    """Hold what came of the held-out tasks: the mean score, and all results."""

    score: float | None
    results: list[Ran]

    @property
    def failed(self) -> int:
        """Return how many runs failed."""
        return sum(result.error is not None for result in self.results)


async def examine(
    scenario: Scenario, url: str, tasks: Sequence[Task], folder: Path, *, name: str
) -> Exam:
    """Give the agent the held-out tasks, and judge what it does: an evaluation.

    Args:
        scenario: whose agent.
        url: the proxy's address, without `/v1`.
        tasks: the held-out tasks.
        folder: where journals, logs and NAME.jsonl, the results, are written.
        name: what the files are called by.

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
    lines = [json.dumps(as_line(result), ensure_ascii=False) for result in results]
    (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    scores = [one.metrics[scenario.score] for one in results if scenario.score in one.metrics]
    return Exam(score=round(fmean(scores), 4) if scores else None, results=results)


def as_line(result: Ran) -> dict[str, Any]:
    """Return a result as a line of a file: what the agent returned, if it was an object."""
    value = result.value if isinstance(result.value, dict) else {"output": result.value}
    return {**value, "id": result.task, "sample": result.sample, "error": result.error}


def response_ids(results: Sequence[Ran]) -> list[str]:
    """Return the ids of replies that results name; a plain text names none."""
    values = [result.value for result in results if isinstance(result.value, dict)]
    return [value["response_id"] for value in values if value.get("response_id")]
