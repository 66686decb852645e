"""Run all that is planned: so many at once, each written down before it is posted."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from hashlib import sha256
from typing import Any, Final
from uuid import uuid4

import msgspec

from pawl.judging.answers import JudgeFailed
from pawl.judging.feedback import FeedbackClient
from pawl.rollout.agents import Agent, Request, environment, named_url
from pawl.rollout.figures import Figures
from pawl.rollout.journal import Begun, Ended, Journal, Key, Posted
from pawl.rollout.judges import RunJudge
from pawl.rollout.proxy import ProxyClient
from pawl.rollout.tasks import Task
from store.records import Record, Split

# After Ctrl-C, feedback that was not taken in this time is left to the next start.
LEAVE_S: Final = 10.0


class Job(Record, frozen=True, kw_only=True):
    """State what is run: each task `samples` times, `at_once` at the same time.

    `policy` is the model to ask for; `""` leaves it to the agent. It does not see `hidden` fields.
    """

    url: str
    tasks: tuple[Task, ...]
    samples: int = 1
    policy: str = ""
    split: Split | None = None
    limit_s: float = 600.0
    at_once: int = 16
    hidden: frozenset[str] = frozenset()


class Rollout:
    """Run one rollout; `unposted` has the ended attempts that `/feedback` has not taken."""

    def __init__(
        self,
        job: Job,
        agent: Agent,
        judge: RunJudge,
        journal: Journal,
        feedback: FeedbackClient,
        proxy: ProxyClient,
        *,
        on_end: Callable[[Key, Ended], None] = lambda key, ended: None,
    ) -> None:
        """Store the parts; `on_end` is called for each attempt that counts."""
        self._job = job
        self._agent = agent
        self._judge = judge
        self._journal = journal
        self._feedback = feedback
        self._proxy = proxy
        self._on_end = on_end
        self._tasks = {task.name: task for task in job.tasks}
        # Names never repeat, whatever becomes of the journal.
        self._launch = uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self._lanes: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self.figures = Figures(len(job.tasks) * job.samples)
        self.under_way = 0
        self.unposted: dict[str, Ended] = {}

    @property
    def trouble(self) -> str:
        """Return what the rollout waits for, in words; empty if it gets on."""
        if self._feedback.trouble is not None:
            return f"feedback waits: {self._feedback.trouble}"
        if self._stop.is_set():
            return f"stopping: {self.under_way} runs under way (Ctrl-C gives them up)"
        return ""

    def stop(self) -> None:
        """Begin no more runs; called again, give up those that are under way."""
        if self._stop.is_set():
            for lane in self._lanes:
                lane.cancel()
        self._stop.set()

    async def run(self) -> None:
        """Do what the journal has not got yet, and post all that is to be posted.

        Raises:
            RolloutError: the journal cannot be written.
        """
        past = self._journal.past
        for ended in past.settled.values():
            self.figures.add(ended)
        self.unposted = {ended.episode: ended for ended in past.unposted}
        for begun in past.under_way:
            self._abandon(begun.episode)
        work = self._work(list(self.unposted.values()))
        self._lanes = [asyncio.create_task(self._lane(work)) for _ in range(self._job.at_once)]
        try:
            done, _ = await asyncio.wait(self._lanes, return_when=asyncio.FIRST_EXCEPTION)
            for lane in done:
                if not lane.cancelled():
                    lane.result()
        finally:
            for lane in self._lanes:
                lane.cancel()
            await asyncio.wait(self._lanes)
        # Those that were given up.
        await asyncio.gather(*map(self._post, list(self.unposted.values())))

    def _work(self, unposted: Iterable[Ended]) -> Iterator[Ended | Key]:
        yield from unposted
        for task, sample in itertools.product(self._tasks, range(self._job.samples)):
            if (key := Key(task, sample)) not in self._journal.past.settled:
                yield key

    async def _lane(self, work: Iterator[Ended | Key]) -> None:
        for item in work:
            if isinstance(item, Ended):
                await self._post(item)
                continue
            while not self._stop.is_set() and not await self._settle(item):
                await self._until_stopped(self._proxy.wait())

    async def _settle(self, key: Key) -> bool:
        """Make one attempt; return whether it counts."""
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
            # The proxy was away, or the model server: that is no fault of the agent's.
            await self._post(self._abandon(episode, "proxy away", ended.detail))
            return False
        self._end(ended)
        # Nothing is posted before it is certain that it is never done again.
        await self._journal.sync()
        self._on_end(key, ended)
        await self._post(ended)
        return True

    async def _attempt(self, key: Key, episode: str) -> Ended:
        """Run the agent once, and judge what it did."""
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
            # A failure is no reward of 0.
            failed = ({"metric": "run_failed", "value": 1, "episode": episode},)
            ended = partial(ended, error=result.error, detail=result.detail)
            return ended(outcome="failed", statements=failed)
        try:
            statements = await self._judge.judge(task, episode, result.output)
        except JudgeFailed as error:
            return ended(outcome="unjudged", error="judge failed", detail=str(error))
        return ended(outcome="done", statements=tuple(statements))

    def _request(self, key: Key, task: Task, episode: str) -> Request:
        job, split = self._job, self._job.split
        fields = {name: value for name, value in task.fields.items() if name not in job.hidden}
        sample = str(key.sample)
        variables = environment(
            named_url(job.url, task=task.name, episode=episode, split=split),
            model=job.policy or None,
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
        """Note that an attempt does not count, also in the ledger."""
        ended = Ended(
            episode=episode,
            outcome="abandoned",
            error=error,
            detail=detail,
            statements=({"metric": "run_abandoned", "value": 1, "episode": episode},),
        )
        self._end(ended)
        return ended

    def _end(self, ended: Ended) -> None:
        self._journal.append(ended)
        self.figures.add(ended)
        if ended.statements:
            self.unposted[ended.episode] = ended.without_output()

    async def _post(self, ended: Ended) -> None:
        """Post an attempt's statements; once stopped, try for a while only."""
        if ended.statements:
            await self._until_stopped(self._posted(ended), LEAVE_S)

    async def _posted(self, ended: Ended) -> None:
        # The same at each try, also after the runner was killed: a journal keeps the statements.
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
        """Wait until the work is done; when the rollout is stopped, for `grace_s` longer only."""
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
