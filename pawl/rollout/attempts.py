"""Make one attempt at a run: the agent gets its request, the judge what came of it."""

import itertools
import os
import time
from collections.abc import Iterator
from functools import partial

import msgspec

from pawl.judging.errors import JudgeFailed
from pawl.rollout.addresses import Request, as_json, environment, named_url, shown
from pawl.rollout.agents.agent import Agent, Result
from pawl.rollout.errors import RunLost, WorkerCrashed
from pawl.rollout.journal import FAILED, Finished, Key, abandoned
from pawl.rollout.judges import RunJudge
from pawl.rollout.proxy_view import ProxyView, only_policy
from pawl.rollout.tasks import Task
from store.records import Record, Split


class Job(Record, frozen=True, kw_only=True):
    """State what is run.

    Attributes:
        url: the proxy's address, without `/v1`.
        tasks: the tasks, in order.
        samples: how often each is run.
        policies: the models to ask for, each on all tasks; `""` leaves it to the agent.
        split: what the URL says; None: nothing.
        limit_s: time limit of one run.
        at_once: how many run at the same time.
        hidden: the fields of the tasks that the agent must not see.
    """

    url: str
    tasks: tuple[Task, ...]
    samples: int = 1
    policies: tuple[str, ...] = ("",)
    split: Split | None = None
    limit_s: float = 600.0
    at_once: int = 16
    hidden: frozenset[str] = frozenset()

    def every_run(self) -> Iterator[Key]:
        """Yield all runs, those of one task together."""
        for policy, task, sample in itertools.product(
            self.policies, self.tasks, range(self.samples)
        ):
            yield Key(policy, task.name, sample)

    @property
    def runs(self) -> int:
        """Return how many runs there are."""
        return len(self.policies) * len(self.tasks) * self.samples


class Attempts:
    """Make attempts at the runs of one job."""

    def __init__(self, job: Job, agent: Agent, judge: RunJudge, view: ProxyView) -> None:
        """Store the parts."""
        self._job = job
        self._agent = agent
        self._judge = judge
        self._view = view
        self._tasks = {task.name: task for task in job.tasks}
        # Runs that may have crashed the worker that they shared.
        self._suspects: set[Key] = set()

    async def make(self, key: Key, episode: str) -> tuple[Finished, Result]:
        """Run the agent once, and judge what it did."""
        started = time.monotonic()
        try:
            result = await self._agent.run(self._request(key, episode))
        except WorkerCrashed as error:
            self._suspects.add(key)
            return lost(episode, "worker crashed", str(error)), Result(error="worker crashed")
        except RunLost as error:
            return lost(episode, "lost", str(error)), Result(error="lost")
        finished = Finished(
            episode=episode,
            outcome="done",
            error=result.error,
            detail=result.detail,
            status=result.status,
            output=result.output,
            errors=result.errors,
            seconds=round(time.monotonic() - started, 3),
            version=self._version(key.policy),
        )
        return await self._judged(finished, key), result

    async def _judged(self, finished: Finished, key: Key) -> Finished:
        """Return an attempt's end with what is to be said of it: a failure is no reward of 0."""
        changed = partial(msgspec.structs.replace, finished)
        if finished.error is not None:
            statement = {"metric": FAILED, "value": 1, "episode": finished.episode}
            return changed(outcome="failed", statements=(statement,))
        task = self._tasks[key.task]
        try:
            statements = await self._judge.judge(task, finished.episode, finished.output)
        except JudgeFailed as error:
            return changed(outcome="unjudged", error="judge failed", detail=str(error))
        return changed(statements=tuple(statements))

    def _request(self, key: Key, episode: str) -> Request:
        job, task = self._job, self._tasks[key.task]
        fields = shown(task.fields, job.hidden)
        url = named_url(job.url, task=task.name, episode=episode, split=job.split)
        model = key.policy or None
        sample, split = str(key.sample), job.split or ""
        names = {"TASK_ID": task.name, "EPISODE": episode, "SAMPLE": sample, "SPLIT": split}
        variables = environment(
            url, model=model, given=os.environ, names=names, task=as_json(fields)
        )
        return Request(
            episode=episode,
            task=fields,
            base_url=url,
            model=model,
            environment=variables,
            limit_s=job.limit_s,
            alone=key in self._suspects,
        )

    def _version(self, policy: str) -> str | None:
        if "@" in policy:
            return policy
        serving = self._view.serving
        return serving.get(policy) if policy else only_policy(serving)


def lost(episode: str, error: str, detail: str) -> Finished:
    """Return the end of an attempt that does not count, and why it was lost."""
    return msgspec.structs.replace(abandoned(episode), error=error, detail=detail)
