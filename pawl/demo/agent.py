"""Run the example agent and its judge as `pawl rollout` runs any agent, and keep their results."""

import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import aiohttp

from pawl.demo.errors import DemoFailed
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
from pawl.rollout.tasks import Task, digest, parse_tasks
from pawl.rollout.verdicts import metrics_of
from store.records import Split

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "calculator"
AGENT: Final = "agent:answer"
JUDGE: Final = "judge:verdict"
ANSWER: Final = "answer"
JUDGE_S: Final = 60.0
EXAM_CONCURRENCY: Final = 32


def script(name: str) -> list[str]:
    """Return the command that runs one of the example's programs.

    Raises:
        DemoFailed: the program is missing, because Pawl does not run from a checkout.
    """
    path = EXAMPLE / name
    if not path.exists():
        raise DemoFailed(f"{path} is missing: run the demo from a checkout of the repository")
    return [sys.executable, str(path)]


async def make_questions(count: int, seed: int, split: str, folder: Path) -> tuple[Path, Path]:
    """Write `count` questions to a file for the agent, and with answers to one for the judge.

    Args:
        count: number of questions.
        seed: random seed of the questions.
        split: `train` or `held-out`; no question is in both.
        folder: where the two files are written.

    Returns:
        The file of questions, and the file of the same questions with answers.

    Raises:
        DemoFailed: the example's program failed.
    """
    plain, answered = folder / f"{split}.jsonl", folder / f"{split}-answers.jsonl"
    options = ["--count", str(count), "--seed", str(seed), "--split", split]
    plain.write_bytes(await run([*script("questions.py"), *options]))
    answered.write_bytes(await run([*script("questions.py"), *options, "--with-answers"]))
    return plain, answered


async def run(command: Sequence[str]) -> bytes:
    """Run a program to its end, and return its standard output.

    Raises:
        DemoFailed: it ended with an error; the message has the end of its standard error.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode:
        raise DemoFailed(f"{Path(command[1]).name} failed: {err.decode(errors='replace')[-800:]}")
    return out


class WorkingAgent:
    """Keep the example agent and its judge warm, and give them questions.

    Attributes:
        results: all results collected so far, as the agent's own program writes them.
    """

    def __init__(
        self, url: str, model: str, answered: Path, folder: Path, *, name: str = "train"
    ) -> None:
        """Store where the agent works, and where its files go.

        Args:
            url: the proxy's address, without `/v1`.
            model: the model that the agent asks for.
            answered: the file of questions with answers, which only the judge gets to see.
            folder: where journals and logs are written.
            name: what the files are called by.
        """
        self._url = url
        self._model = model
        self._folder = folder
        self._name = name
        tasks = parse_tasks(answered.read_bytes(), str(answered), ANSWER)
        self._tasks = {task.name: task for task in tasks}
        log = folder / "agent.log"
        function = Function(name=AGENT, log_file=log, folder=EXAMPLE, model_is_told=True)
        self._agent = WarmAgent(function)
        self._judge = PythonJudge(
            WarmWorker(Function(name=JUDGE, log_file=log, folder=EXAMPLE)), JUDGE_S
        )
        self._numbers = itertools.count(1)
        self._rollouts: list[tuple[Rollout, asyncio.Task[None]]] = []
        self._fresh: list[dict[str, Any]] = []
        self._unjudged: str | None = None
        self.verdicts: list[dict[str, float]] = []
        self.results: list[dict[str, Any]] = []

    async def start(self, *, samples: int, concurrency: int, split: Split | None = None) -> None:
        """Start both; each question is asked `samples` times, `concurrency` at a time.

        Raises:
            DemoFailed: one of them cannot be run.
        """
        self._samples, self._concurrency, self._split = samples, concurrency, split
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            script("agent.py")
            await self._agent.start(concurrency)
            await self._judge.start()
        except RolloutError as error:
            await self.stop()
            raise DemoFailed(str(error)) from error

    def ask(self, lines: Sequence[str]) -> None:
        """Give questions to the agent, one JSON line each."""
        tasks = tuple(self._tasks[str(json.loads(line)["id"])] for line in lines)
        job = Job(
            url=self._url,
            tasks=tasks,
            samples=self._samples,
            policies=(self._model,),
            split=self._split,
            at_once=self._concurrency,
            hidden=frozenset({ANSWER}),
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
            tasks=digest(tasks),
            samples=job.samples,
            agent=AGENT,
            judge=JUDGE,
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
        self.verdicts.append(metrics_of(finished.statements))
        self._fresh.append(as_result(self._tasks[key.task], key.sample, finished, result))

    def collect(self) -> list[dict[str, Any]]:
        """Return the results that came since the last call.

        Raises:
            DemoFailed: the agent or the judge cannot go on.
        """
        for _, working in self._rollouts:
            if working.done() and not working.cancelled() and (error := working.exception()):
                raise DemoFailed(f"the agent cannot go on: {error}") from error
        if self._unjudged is not None:
            raise DemoFailed(f"the judge failed: {self._unjudged}")
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


def as_result(task: Task, sample: int, finished: Finished, result: Result) -> dict[str, Any]:
    """Return a run's result as the agent's own program writes it."""
    if finished.error is None:
        return {**result.value, "sample": sample}
    error = f"{finished.error}: {finished.detail}"
    missing = dict.fromkeys(("response_id", "answer", "tool"))
    asked = {"id": task.name, "question": task.fields["question"], "sample": sample}
    return {**asked, **missing, "error": error}


async def examine(
    url: str, model: str, questions: Path, answers: Path, out: Path, *, samples: int
) -> dict[str, Any]:
    """Have the agent answer the held-out questions, and judge its answers: an evaluation.

    Args:
        url: the proxy's address, without `/v1`.
        model: the model that the agent asks for.
        questions: the file of questions.
        answers: the file of the same questions with answers.
        out: where the results are written; an old file is replaced.
        samples: how often each question is asked.

    Returns:
        `success` (of the answers that came), `results` and `failed_calls`.

    Raises:
        DemoFailed: the agent or the judge failed.
    """
    agent = WorkingAgent(url, model, answers, out.parent, name=out.stem)
    await agent.start(samples=samples, concurrency=EXAM_CONCURRENCY, split="eval")
    try:
        agent.ask(questions.read_text().splitlines())
        await agent.finish()
        results = agent.collect()
    finally:
        await agent.stop()
    out.write_text("".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results))
    rights = [verdict["success"] for verdict in agent.verdicts if "success" in verdict]
    return {
        "success": round(fmean(rights), 4) if rights else None,
        "results": len(rights),
        "failed_calls": sum(result["error"] is not None for result in results),
    }
