"""Compare two versions on the same tasks; the two versions' runs of one task are a pair.

A seed shuffles the tasks. Pairs are compared in this order, not in the order in which they end. So
each intermediate result is about a random part of the tasks, and an interrupted evaluation reaches
the same verdict.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from controller.comparison import ComparedEpisode, Comparison, Figures, Verdict
from pawl.judging.answers import metrics_of
from pawl.rollout.journal import Ended, RolloutPlan, RunKey
from pawl.rollout.running import Rollout
from pawl.rollout.setup import Setup
from pawl.rollout.tasks import RolloutError, Task, tasks_digest
from store.records import REWARD, Feedback, Record
from store.tenants import task_family
from store.values.rewards import REWARD_ALONE, RewardRule, reward_of

if TYPE_CHECKING:
    from trainer.recipes.recipe import PublishOptions

# `stopped`: before the budget was used up; the same command resumes it.
Outcome = Literal["better", "worse", "undecided", "stopped"]
# All statements about a run get the same time.
STATEMENT_TIME: Final = datetime.fromtimestamp(0, UTC)
# Intervals to draw: with enough tasks, this many to twice as many.
MOST_LOOKS: Final = 60


class EvaluationJob(Record, frozen=True, kw_only=True):
    """An evaluation: agent and tasks, two versions (NAME@N), and how they are compared.

    Each version runs each task `tries` times. Tasks are run in a random order given by `seed`, as
    many as `most_runs` runs in all allow.
    """

    setup: Setup
    new: str
    old: str
    rule: "PublishOptions"
    rewards: RewardRule = REWARD_ALONE
    tries: int = 4
    most_runs: int = 2000
    seed: int = 0

    def plan(self, tasks: tuple[Task, ...]) -> RolloutPlan:
        """Return the evaluation's plan; a journal that is resumed must have the same plan.

        Raises:
            RolloutError: nothing scores the runs.
        """
        rule, setup = self.rule, self.setup
        if not setup.judge_name:
            raise RolloutError("say with --answer FIELD or --judge COMMAND what scores a run")
        low, high = rule.reward_range
        return RolloutPlan(
            tasks=tasks_digest(tasks),
            samples=self.tries,
            agent=setup.agent_name,
            judge=setup.judge_name,
            split="eval",
            policy=self.new,
            hidden=tuple(sorted(set(setup.hide))),
            against=self.old,
            seed=self.seed,
            rule=f"margin {rule.margin:g}, range {low:g} to {high:g}, mistakes {rule.mistakes:g}",
        )

    def runs(self, tasks: Sequence[Task]) -> tuple[RunKey, ...]:
        """Return all runs: task by task in the order of the seed, both versions side by side.

        Raises:
            RolloutError: the budget is too small for one task.
        """
        affordable = self.most_runs // (2 * self.tries)
        if not affordable:
            raise RolloutError(
                f"--most-runs {self.most_runs} does not suffice for one task, which needs "
                f"{2 * self.tries}: {self.tries} tries (--tries) of both versions"
            )
        names = [task.name for task in tasks]
        chance = random.Random(self.seed)
        chance.shuffle(names)
        # The first of two runs may take longer, as nothing is cached yet: draw which one is first.
        sides = ((self.new, self.old), (self.old, self.new))
        return tuple(
            RunKey(name, number, version)
            for name in names[:affordable]
            for number in range(self.tries)
            for version in chance.choice(sides)
        )


class Family(Record, frozen=True):
    name: str
    tasks: int
    figures: Figures


class Failure(Record, frozen=True):
    """The number of runs of a task in which the agent failed, by version and kind of error."""

    task: str
    version: str
    error: str
    runs: int


class Look(Record, frozen=True):
    """The estimated difference of the versions and its bounds, after the first `tasks` tasks."""

    tasks: int
    difference: float
    lower: float
    upper: float


class EvaluationReport(Record, frozen=True, kw_only=True):
    """The result of an evaluation, printed as JSON.

    Attributes:
        new: the tested version, NAME@N.
        old: the version that it was compared with.
        margin: how much lower the new version may score and still be no worse.
        outcome: `better`: not worse by more than the margin; `undecided`: budget or time is over.
        reason: the reason for the outcome, in a sentence.
        points_to_harm: see `Comparison.points_to_harm`.
        planned: the number of tasks to run.
        tasks: how many tasks both versions ran completely, in order.
        compared: how many of `tasks` have a scored run of both versions.
        tries: runs of each task with each version.
        runs: all finished runs, also of tasks that only one version ran completely.
        figures: the figures behind the verdict.
        families: the figures of each family of tasks.
        failures: the failed runs by task.
        looks: the interval of the difference after growing numbers of tasks.
    """

    new: str
    old: str
    margin: float
    outcome: Outcome
    reason: str
    points_to_harm: bool
    planned: int
    tasks: int
    compared: int
    tries: int
    runs: int
    figures: Figures
    families: list[Family]
    failures: list[Failure]
    looks: list[Look]


class Pairs:
    """Collects finished runs, and compares the versions on each task, in order.

    A task is compared once both versions have completed all its runs. `comparison` covers all tasks
    compared so far; `runs` is the number of finished runs.
    """

    def __init__(self, job: EvaluationJob, runs: Sequence[RunKey]) -> None:
        self._job = job
        self._order = list(dict.fromkeys(key.task for key in runs))
        self._planned = frozenset(runs)
        self._unpaired: dict[str, dict[RunKey, ComparedEpisode]] = {}
        self._pairs: list[tuple[list[ComparedEpisode], list[ComparedEpisode]]] = []
        self._failures: Counter[tuple[str, str, str]] = Counter()
        self.comparison = Comparison(job.rule)
        self.runs = 0
        self.is_out_of_time = False

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict, which no later run changes, or None if there is none yet."""
        return self.comparison.verdict

    @property
    def tasks(self) -> int:
        """Return how many tasks both versions ran completely, scored or not."""
        return len(self._pairs)

    @property
    def planned(self) -> int:
        """Return how many tasks there are to run."""
        return len(self._order)

    def add(self, key: RunKey, ended: Ended) -> None:
        """Add a run that ended; a run that is no longer planned is ignored."""
        if key not in self._planned:
            return
        self.runs += 1
        if ended.outcome == "failed":
            self._failures[key.task, key.policy, ended.error or "failed"] += 1
        self._unpaired.setdefault(key.task, {})[key] = _compared_episode(
            key, ended, self._job.rewards
        )
        while self.verdict is None and self.tasks < self.planned:
            episodes = self._unpaired.get(self._order[self.tasks], {})
            if len(episodes) < 2 * self._job.tries:
                return
            by_side = [
                [episode for key, episode in sorted(episodes.items()) if key.policy == version]
                for version in (self._job.new, self._job.old)
            ]
            self._pairs.append((by_side[0], by_side[1]))
            self.comparison.add_pair(*by_side)

    def report(self) -> EvaluationReport:
        """Return the comparison so far, with its outcome and the reason for it."""
        outcome, reason = self._outcome()
        return EvaluationReport(
            new=self._job.new,
            old=self._job.old,
            margin=self._job.rule.margin,
            outcome=outcome,
            reason=reason,
            points_to_harm=self.comparison.points_to_harm,
            planned=self.planned,
            tasks=self.tasks,
            compared=self.comparison.blocks,
            tries=self._job.tries,
            runs=self.runs,
            figures=self.comparison.figures(),
            families=self._families(),
            failures=[Failure(*about, runs) for about, runs in sorted(self._failures.items())],
            looks=self._looks(),
        )

    def _outcome(self) -> tuple[Outcome, str]:
        if self.verdict is not None:
            # The verdict's text does not name the old version.
            return self.verdict.kind, self.verdict.reason.replace("the old version", self._job.old)
        if not self.is_out_of_time and self.tasks < self.planned:
            return "stopped", "it was stopped before its end; the same command resumes it"
        over = "time is over" if self.tasks < self.planned else "every planned task was run"
        if self.comparison.difference is None:
            return "undecided", f"{over}, and no task has a scored run of both versions"
        speaks = "speaks" if self.comparison.points_to_harm else "does not speak"
        return "undecided", f"{over}; the evidence so far {speaks} against {self._job.new}"

    def _families(self) -> list[Family]:
        families: dict[str, tuple[int, Comparison]] = {}
        for new, old in self._pairs:
            name = new[0].family
            tasks, comparison = families.get(name, (0, Comparison(self._job.rule)))
            comparison.add_pair(new, old)
            families[name] = tasks + 1, comparison
        return [
            Family(name, tasks, comparison.figures())
            for name, (tasks, comparison) in sorted(families.items())
        ]

    def _looks(self) -> list[Look]:
        looks: list[Look] = []
        comparison = Comparison(self._job.rule)
        step = max(1, self.tasks // MOST_LOOKS)
        for number, pair in enumerate(self._pairs, start=1):
            comparison.add_pair(*pair)
            if comparison.difference is not None and (self.tasks - number) % step == 0:
                seen = comparison.figures()
                looks.append(Look(number, comparison.difference, seen.lower, seen.upper))
        return looks


def _compared_episode(key: RunKey, ended: Ended, rule: RewardRule) -> ComparedEpisode:
    is_done = ended.outcome == "done"
    values: dict[str, Any] = {
        one.get("metric") or REWARD: one["value"]
        for one in ended.statements
        if isinstance(one.get("value"), str)
    }
    values |= metrics_of(ended.statements)
    feedback = [
        Feedback(metric=name, value=value, at=STATEMENT_TIME) for name, value in values.items()
    ]
    return ComparedEpisode(
        family=task_family(key.task),
        reward=reward_of(feedback, rule).value if is_done else None,
        failed=ended.outcome == "failed",
        seconds=ended.seconds if is_done else None,
    )


async def evaluate(
    job: EvaluationJob,
    *,
    within_s: float | None = None,
    show: Callable[[Rollout, Pairs], Coroutine[Any, Any, None]] | None = None,
) -> Pairs:
    """Make the runs missing in the journal until there is a verdict, and return the pairs.

    Unfinished runs are given up at the verdict. Without one, the evaluation ends undecided once all
    runs are done, or after `within_s` seconds. `show` runs meanwhile, and is cancelled at the end.

    Raises:
        RolloutError: the options cannot be used, no proxy answers, or the proxy lacks a version.
    """
    tasks = job.setup.read_tasks()
    runs, plan = job.runs(tasks), job.plan(tasks)
    pairs = Pairs(job, runs)

    def add_run(key: RunKey, ended: Ended) -> None:
        pairs.add(key, ended)
        if pairs.verdict is not None:
            rollout.give_up()

    def end_undecided() -> None:
        pairs.is_out_of_time = True
        rollout.give_up()

    async with job.setup.rollout(tasks, plan, runs=runs, on_end=add_run) as rollout:
        for key, ended in rollout.past.items():
            pairs.add(key, ended)
        if pairs.verdict is not None:
            rollout.give_up()
        async with AsyncExitStack() as exits:
            if within_s is not None:
                exits.callback(
                    asyncio.get_running_loop().call_later(within_s, end_undecided).cancel
                )
            if show is not None:
                exits.push_async_callback(_cancel, asyncio.create_task(show(rollout, pairs)))
            await rollout.run()
        if rollout.hint:
            raise RolloutError(rollout.hint)
    return pairs


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
