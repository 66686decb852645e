"""Make the planned runs, write each to the journal, post its feedback, count the outcomes."""

import asyncio
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from hashlib import sha256
from typing import Any, Final
from uuid import uuid4

import msgspec

from pawl.judging.answers import JudgeFailed, metrics_of
from pawl.judging.feedback import FeedbackClient
from pawl.rollout.agents import Agent, Request, run_environment, run_url
from pawl.rollout.journal import Begun, Ended, Journal, Posted, RolloutPlan, RunKey
from pawl.rollout.judges import RunJudge
from pawl.rollout.proxy import ProxyClient
from pawl.rollout.tasks import RolloutError, Task
from store.records import REWARD, Record
from store.values.intervals import mean_interval

# After this many accepted posts, all about episodes without a call, show HINT.
SILENT: Final = 3
HINT: Final = (
    "the proxy has seen no call of any run: the agent must read OPENAI_BASE_URL (or "
    "ANTHROPIC_BASE_URL) in each run, and call it"
)
# After Ctrl-C, feedback that is not accepted in this time is left to the next start.
LEAVE_S: Final = 10.0


class Job(Record, frozen=True, kw_only=True):
    """The work of a rollout: the plan's tasks, with `at_once` runs at the same time.

    The plan's policy is the model to request; `""` leaves the choice to the agent. The agent does
    not see the `hidden` fields: the plan's hidden fields and the answer. `runs` are all runs in
    order; None: the plan's, task by task.
    """

    url: str
    tasks: tuple[Task, ...]
    plan: RolloutPlan
    limit_s: float = 600.0
    at_once: int = 16
    hidden: frozenset[str] = frozenset()
    runs: tuple[RunKey, ...] | None = None

    @property
    def planned(self) -> int:
        """Return the number of runs to make."""
        return len(self.tasks) * self.plan.samples if self.runs is None else len(self.runs)

    def runs_in_order(self) -> Iterator[RunKey]:
        """Yield all runs in order."""
        if self.runs is not None:
            yield from self.runs
            return
        for task, sample in itertools.product(self.tasks, range(self.plan.samples)):
            yield RunKey(task.name, sample)


class RunCounts:
    """Counts a rollout's settled runs, and all errors, also those of abandoned attempts."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.metrics: dict[str, list[float]] = {}

    def add(self, ended: Ended) -> None:
        """Count an attempt that ended; metrics count only if it is done."""
        self.outcomes[ended.outcome] += 1
        if ended.error is not None:
            self.errors[ended.error] += 1
        if ended.outcome == "done":
            for metric, value in metrics_of(ended.statements).items():
                self.metrics.setdefault(metric, []).append(value)

    @property
    def runs(self) -> int:
        """Return the number of settled runs."""
        return self.outcomes.total() - self.outcomes["abandoned"]

    @property
    def reward(self) -> float | None:
        """Return the mean reward, or None if no run has one."""
        rewards = self.metrics.get(REWARD)
        return math.fsum(rewards) / len(rewards) if rewards else None

    def summary(self) -> dict[str, Any]:
        """Return the counts, and the mean reward with its 95 % interval, for JSON."""
        low, high = self._interval()
        means = {name: math.fsum(values) / len(values) for name, values in self.metrics.items()}
        return {
            "planned": self.planned,
            "runs": self.runs,
            "failed": self.outcomes["failed"],
            "unjudged": self.outcomes["unjudged"],
            "abandoned": self.outcomes["abandoned"],
            "rewarded": len(self.metrics.get(REWARD, ())),
            "reward": _rounded(self.reward),
            "low": _rounded(low),
            "high": _rounded(high),
            "metrics": {name: _rounded(mean) for name, mean in means.items()},
            "errors": dict(self.errors.most_common()),
        }

    def _interval(self) -> tuple[float | None, float | None]:
        """Return the mean reward's 95 % interval: Wilson's if all are 0 or 1, else Student's."""
        mean, rewards = self.reward, self.metrics.get(REWARD, [])
        if mean is None:
            return None, None
        number, is_right = len(rewards), {0.0, 1.0}.issuperset(rewards)
        error = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards)) / number
        interval = mean_interval(mean, number, number, error, zero_or_one=is_right)
        return interval or (None, None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


class Rollout:
    """A rollout in progress.

    `unposted` has the ended attempts whose statements `/feedback` has not accepted, `past` the runs
    that were settled in the journal at the start. `on_end` is called for each run that is settled
    by this process.
    """

    def __init__(
        self,
        job: Job,
        agent: Agent,
        judge: RunJudge,
        journal: Journal,
        feedback: FeedbackClient,
        proxy: ProxyClient,
        *,
        on_end: Callable[[RunKey, Ended], None] = lambda key, ended: None,
    ) -> None:
        self._job = job
        self._agent = agent
        self._judge = judge
        self._journal = journal
        self._feedback = feedback
        self._proxy = proxy
        self._on_end = on_end
        self._tasks = {task.name: task for task in job.tasks}
        # Episode names are unique, even if the journal is lost.
        self._launch = uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self._lanes: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self.figures = RunCounts(job.planned)
        self.under_way = 0
        self.unposted: dict[str, Ended] = {}
        self.past = journal.past.settled

    @property
    def trouble(self) -> str:
        """Return in words what the rollout waits for; empty if it waits for nothing."""
        if self._feedback.trouble is not None:
            return f"feedback waits: {self._feedback.trouble}"
        if self._stop.is_set():
            return f"stopping: {self.under_way} runs under way (Ctrl-C gives them up)"
        return ""

    @property
    def hint(self) -> str | None:
        """Return HINT if the proxy knows none of the episodes, else None."""
        is_silent = self._feedback.accepted >= SILENT and not self._feedback.matched
        return HINT if is_silent and self.figures.runs else None

    def stop(self) -> None:
        """Begin no more runs; a second call gives up the runs under way."""
        if self._stop.is_set():
            self.give_up()
        self._stop.set()

    def give_up(self) -> None:
        """Stop, and give up the runs that are under way."""
        self._stop.set()
        for lane in self._lanes:
            lane.cancel()

    async def run(self) -> None:
        """Make the runs missing in the journal, and post all feedback that is not posted yet.

        Raises:
            RolloutError: the journal cannot be written, or the requested model is gone.
        """
        past = self._journal.past
        for ended in self.past.values():
            self.figures.add(ended)
        self.unposted = {ended.episode: ended for ended in past.unposted}
        for begun in past.under_way:
            self._abandon(begun.episode)
        work = self._work_items(list(self.unposted.values()))
        self._lanes = [asyncio.create_task(self._run_items(work)) for _ in range(self._job.at_once)]
        try:
            done, _ = await asyncio.wait(self._lanes, return_when=asyncio.FIRST_EXCEPTION)
            for lane in done:
                if not lane.cancelled():
                    lane.result()
        finally:
            for lane in self._lanes:
                lane.cancel()
            await asyncio.wait(self._lanes)
        # Statements of attempts that were given up.
        await asyncio.gather(*map(self._post, list(self.unposted.values())))

    def _work_items(self, unposted: Iterable[Ended]) -> Iterator[Ended | RunKey]:
        yield from unposted
        yield from (key for key in self._job.runs_in_order() if key not in self.past)

    async def _run_items(self, work: Iterator[Ended | RunKey]) -> None:
        for item in work:
            if isinstance(item, Ended):
                await self._post(item)
                continue
            while not self._stop.is_set() and not await self._try_run(item):
                await self._until_stopped(self._proxy.wait())

    async def _try_run(self, key: RunKey) -> bool:
        """Make one attempt at a run; return whether it counts, so that the run is settled."""
        episode = f"rollout-{self._launch}-{next(self._numbers)}"
        self._journal.append(Begun(episode=episode, key=key))
        started = asyncio.get_running_loop().time()
        self.under_way += 1
        try:
            ended = await self._attempt(key, episode)
        except asyncio.CancelledError:
            self._abandon(episode)
            raise
        finally:
            self.under_way -= 1
        if ended.outcome == "failed" and not await self._proxy.answered_since(started):
            # The proxy or the model server was away: the agent is not at fault.
            await self._post(self._abandon(episode, "proxy away", ended.detail))
            return False
        model = key.policy or self._job.plan.policy
        if ended.outcome == "failed" and model and not await self._proxy.has(model):
            self._abandon(episode, "model away", ended.detail)
            raise RolloutError(f"the proxy has no {model!r} any more: it was unloaded meanwhile")
        self._record_end(ended)
        # Post only once the end is on disk: then the run is never repeated.
        await self._journal.sync()
        self._on_end(key, ended)
        await self._post(ended)
        return True

    async def _attempt(self, key: RunKey, episode: str) -> Ended:
        """Run the agent once, and judge its output."""
        started = time.monotonic()
        task = self._tasks[key.task]
        result = await self._agent.run(self._request(key, task, episode))
        ended = partial(
            Ended,
            episode=episode,
            status=result.status,
            output=result.output,
            errors=result.errors,
            seconds=round(time.monotonic() - started, 3),
        )
        if result.error is not None:
            # A failed run gets no reward, not even 0.
            failed = ({"metric": "run_failed", "value": 1, "episode": episode},)
            ended = partial(ended, error=result.error, detail=result.detail)
            return ended(outcome="failed", statements=failed)
        try:
            statements = await self._judge.judge(task, episode, result.output)
        except JudgeFailed as error:
            return ended(outcome="unjudged", error="judge failed", detail=str(error))
        return ended(outcome="done", statements=tuple(statements))

    def _request(self, key: RunKey, task: Task, episode: str) -> Request:
        job, split = self._job, self._job.plan.split
        fields = {name: value for name, value in task.fields.items() if name not in job.hidden}
        sample = str(key.sample)
        variables = run_environment(
            run_url(job.url, task=task.name, episode=episode, split=split),
            model=key.policy or job.plan.policy or None,
            given=os.environ,
            names={
                "TASK_ID": task.name,
                "EPISODE": episode,
                "SAMPLE": sample,
                "SPLIT": split or "",
            },
            task=msgspec.json.encode(fields),
        )
        return Request(task=fields, environment=variables, limit_s=job.limit_s)

    def _abandon(self, episode: str, error: str | None = None, detail: str = "") -> Ended:
        """Record in the journal that an attempt does not count; return its end, to be posted."""
        ended = Ended(
            episode=episode,
            outcome="abandoned",
            error=error,
            detail=detail,
            statements=({"metric": "run_abandoned", "value": 1, "episode": episode},),
        )
        self._record_end(ended)
        return ended

    def _record_end(self, ended: Ended) -> None:
        self._journal.append(ended)
        self.figures.add(ended)
        if ended.statements:
            self.unposted[ended.episode] = ended.without_output()

    async def _post(self, ended: Ended) -> None:
        """Post an attempt's statements; give up `LEAVE_S` seconds after the rollout is stopped."""
        if ended.statements:
            await self._until_stopped(self._try_to_post(ended), LEAVE_S)

    async def _try_to_post(self, ended: Ended) -> None:
        # Each try has the same key, even after a kill, as the journal keeps the statements.
        body = msgspec.json.encode(ended.statements)
        key = "rollout-" + sha256(ended.episode.encode() + b"\0" + body).hexdigest()
        refused = None
        try:
            await self._feedback.post(list(ended.statements), key)
        except JudgeFailed as error:
            refused = str(error)
            self.figures.errors["feedback refused"] += 1
        self._journal.append(Posted(episode=ended.episode, refused=refused))
        del self.unposted[ended.episode]

    async def _until_stopped(self, work: Coroutine[Any, Any, None], grace_s: float = 0.0) -> None:
        """Do the work; cancel it `grace_s` seconds after the rollout is stopped."""
        stopped, working = asyncio.create_task(self._stop.wait()), asyncio.create_task(work)
        try:
            await asyncio.wait([stopped, working], return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait([working], timeout=grace_s)
            for task in done:
                task.result()
        finally:
            stopped.cancel()
            working.cancel()
            await asyncio.wait([stopped, working])
