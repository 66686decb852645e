"""Evaluate the candidates of mode `evaluated` beside live traffic, one of each policy at a time."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from controller.comparison import Comparison
from pawl.rollout.evaluation import EvaluationJob, evaluate
from pawl.rollout.setup import Setup
from pawl.settings import ClientSettings, read_settings
from proxy.settings import ProxySettings
from store.read.gates import VersionInRole
from store.values.rewards import REWARD_ALONE, RewardRule
from trainer.recipes.recipe import EvaluationOptions, PublishOptions

# A failed evaluation is retried after this long, and resumes from its journal.
RETRY_S: Final = 60.0
# Concurrent runs. Few, as live traffic comes first.
AT_ONCE: Final = 2

Evaluate = Callable[[VersionInRole, VersionInRole, PublishOptions], Awaitable[Comparison]]


class Evaluations:
    """Running evaluations, and the results of finished ones.

    A restarted controller begins them again, and they resume from their journals.

    Attributes:
        errors: why the last try failed, by policy.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        """Start empty; `evaluate` compares a candidate with the serving version."""
        self.errors: dict[str, Exception] = {}
        self._evaluate = evaluate
        self._tasks: dict[str, tuple[object, asyncio.Task[Comparison]]] = {}

    async def outcome(
        self, candidate: VersionInRole, serving: VersionInRole, rule: PublishOptions
    ) -> Comparison | None:
        """Return the result of evaluating these two versions, or None while it runs.

        Starts the evaluation if needed, and cancels the policy's other one: of other versions, or
        by another rule.
        """
        name = candidate.version.name
        # `gate` also has the reward rule, which is not in `rule`.
        key = candidate.version.version, serving.version.version, candidate.version.gate
        if name not in self._tasks or self._tasks[name][0] != key:
            await self.forget(name)
            task = asyncio.create_task(self._evaluate_with_retries(candidate, serving, rule))
            self._tasks[name] = key, task
        _, task = self._tasks[name]
        return task.result() if task.done() else None

    async def forget(self, name: str) -> None:
        """Cancel a policy's evaluation, if any, and drop its result and error."""
        if name in self._tasks:
            _, task = self._tasks.pop(name)
            task.cancel()
            await asyncio.wait([task])
        self.errors.pop(name, None)

    async def close(self) -> None:
        for name in list(self._tasks):
            await self.forget(name)

    async def _evaluate_with_retries(
        self, candidate: VersionInRole, serving: VersionInRole, rule: PublishOptions
    ) -> Comparison:
        """Evaluate, and retry failures.

        After `decide_within_h` of failures, return an empty comparison: other versions wait.
        """
        clock, name = asyncio.get_running_loop().time, candidate.version.name
        until = clock() + 3600 * rule.decide_within_h
        while True:
            try:
                comparison = await self._evaluate(candidate, serving, rule)
            except Exception as error:
                self.errors[name] = error
            else:
                self.errors.pop(name, None)
                return comparison
            if clock() >= until:
                return Comparison(rule)
            await asyncio.sleep(RETRY_S)


async def evaluate_candidate(
    candidate: VersionInRole, serving: VersionInRole, rule: PublishOptions
) -> Comparison:
    """Run the tasks of the candidate's recipe with both versions, and compare the results.

    An interrupted evaluation resumes from its journal, unless the journal is lost, or the tasks or
    the rule have changed. It ends after `decide_within_h`, possibly undecided.

    Raises:
        ValueError: the candidate's rule has no valid `evaluation`.
        RolloutError: the tasks or the agent cannot be run: no proxy answers, or a file is missing.
        OSError: the tasks cannot be read, or the journal not written.
    """
    gate = candidate.version.gate or {}
    options = EvaluationOptions.model_validate(gate.get("evaluation"))
    rewards = msgspec.convert(gate.get("reward", REWARD_ALONE), RewardRule)
    new, old = (f"{one.version.name}@{one.version.version}" for one in (candidate, serving))
    folder = Path(tempfile.gettempdir()) / f"pawl-evaluations-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to another user: remove it, so that this controller can store the"
            " journals of its evaluations there"
        )
    tasks = Path(options.tasks)
    # Names alone do not identify versions: an earlier database may have had others of these names.
    updates = [one.version.update_id for one in (candidate, serving)]
    about = repr((updates, sorted(gate.items())))
    digest = sha256(about.encode() + await asyncio.to_thread(tasks.read_bytes)).hexdigest()
    url = options.url or f"http://{read_settings(ProxySettings).listen}"
    setup = Setup(
        tasks=tasks,
        journal=folder / f"{new}-{serving.version.version}-{digest[:16]}.jsonl",
        url=url.rstrip("/").removesuffix("/v1"),
        headers=read_settings(ClientSettings).headers,
        command=options.command,
        python=options.python,
        judge=options.judge,
        answer=options.answer,
        limit_s=options.timeout_s,
        at_once=AT_ONCE,
    )
    job = EvaluationJob(
        setup=setup,
        new=new,
        old=old,
        rule=rule,
        rewards=rewards,
        tries=options.tries,
        most_runs=options.most_runs,
    )
    return (await evaluate(job, within_s=3600 * rule.decide_within_h)).comparison
