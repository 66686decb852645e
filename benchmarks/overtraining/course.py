"""Let the demo's agent work and its trainer learn, past the demo's end, with exams in between."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.overtraining.figures import STEP, TIMES, Exam, Found, Wave, has_learned
from pawl.rollout.tasks import Task
from pawl.scenarios.agent import WorkingAgent, examine
from pawl.scenarios.run import tasks_a_wave
from pawl.scenarios.scenario import Scenario
from pawl.scenarios.tasks import TaskSplit, make_tasks
from pawl.stack.stack import Stack
from store.records import Record
from store.updates.claims import list_updates
from store.version_queries import list_versions
from trainer.recipes.recipe import Recipe

LOOK_S: Final = 0.5
STUCK_S: Final = 1200.0


class Limits(Record, frozen=True, kw_only=True):
    """Say how long a course is: until three times the demo's updates, or one of these limits.

    An exam comes every `every` updates, and asks each held-out question `samples` times.
    """

    every: int
    samples: int
    waves: int
    minutes: float


class Stuck(Exception):
    """Report that a phase of the course did not end."""


class Course:
    """Run one course of learning; `found` has its figures so far."""

    def __init__(
        self,
        scenario: Scenario,
        stack: Stack,
        engine: AsyncEngine,
        recipe: Recipe,
        limits: Limits,
        found: Found,
        tell: Callable[[Found, str], None],
    ) -> None:
        """Store what runs, the recipe that it trains by, and whom to tell of each new figure.

        `found` has the recipe's name and the seed.
        """
        self._scenario = scenario.model_copy(update={"held_out_samples": limits.samples})
        self._stack = stack
        self._engine = engine
        self._recipe = recipe
        self._limits = limits
        self._tell = tell
        self._folder: Path = stack.plan.data_dir
        self._deadline = time.monotonic() + 60.0 * limits.minutes
        self._groups = tasks_a_wave(recipe)
        self._done = 0
        self._is_training = False
        self._served = 0
        self.found = found

    async def run(self) -> Found:
        """Run to the end."""
        held_out = await self._tasks(self._scenario.held_out, "held-out")
        tasks = await self._tasks(self._groups * self._limits.waves, "train")
        await self._examine(held_out)
        agent = WorkingAgent(self._scenario, self._stack.url, self._folder)
        size = self._recipe.claim.group_size
        await agent.start(samples=size, concurrency=self._scenario.at_once)
        try:
            while not self._is_over():
                at = len(self.found.waves) * self._groups
                await self._wave(agent, tasks[at : at + self._groups])
                if len(self.found.steps) >= self.found.exams[-1].updates + self._limits.every:
                    await self._examine(held_out)
        finally:
            await agent.stop()
        if len(self.found.steps) > self.found.exams[-1].updates:
            await self._examine(held_out)
        return self.found

    async def _tasks(self, count: int, split: TaskSplit) -> tuple[Task, ...]:
        return await make_tasks(self._scenario, count, self.found.seed, split, self._folder)

    async def _examine(self, tasks: Sequence[Task]) -> None:
        updates = len(self.found.steps)
        told = await examine(self._scenario, self._stack.url, tasks, self._folder, name="exam")
        answers = sum(self._scenario.score in one.metrics for one in told.results)
        exam = Exam(updates=updates, success=told.score or 0.0, answers=answers)
        self._keep(f"held-out {exam.success:.3f}", exams=(*self.found.exams, exam))

    async def _wave(self, agent: WorkingAgent, tasks: Sequence[Task]) -> None:
        """Give the agent the tasks, and wait until what they teach is learned and served."""
        updates, first = len(self.found.steps), len(agent.results)
        expected = first + len(tasks) * self._recipe.claim.group_size
        agent.ask(tasks)

        async def answered() -> bool:
            agent.collect()
            return len(agent.results) >= expected

        await self._until(answered)
        await self._until(self._is_trained)
        score = self._scenario.score
        scored = [one.metrics for one in agent.results[first:] if score in one.metrics]
        success = fmean(metrics[score] for metrics in scored)
        waves = (*self.found.waves, Wave(updates=updates, success=success))
        end = self.found.demo_updates
        if end is None and has_learned(waves, self._scenario.learned):
            end = len(self.found.steps)
        self._keep(f"wave {len(waves)}: {success:.3f}", waves=waves, demo_updates=end)

    async def _until(self, is_done: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + STUCK_S
        while not await is_done():
            self._stack.check()
            if time.monotonic() > deadline:
                raise Stuck(f"no end after {STUCK_S:.0f} s: see {self._stack.plan.log_dir}")
            await asyncio.sleep(LOOK_S)

    async def _is_trained(self) -> bool:
        """Return whether each wave had its update, none runs, and the newest version serves."""
        async with self._engine.connect() as connection:
            updates = await list_updates(connection, self._scenario.model)
            versions = await list_versions(connection, self._scenario.model)
        done = [one for one in updates if one.state == "done"]
        made = [one for one in done if one.version is not None]
        steps = tuple({key: one.metrics.get(key) for key in STEP.values()} for one in made)
        self.found = msgspec.structs.replace(
            self.found, steps=steps, without_version=len(done) - len(made)
        )
        newest = max((one.version or 0 for one in made), default=0)
        serving = max((one.version for one in versions if one.state == "serving"), default=0)
        is_idle = all(one.state != "running" for one in updates)
        return len(done) > len(self.found.waves) and is_idle and serving >= newest

    def _is_over(self) -> bool:
        times = self.found.times
        is_long = times is not None and times >= TIMES
        is_late = time.monotonic() > self._deadline
        return is_long or is_late or len(self.found.waves) >= self._limits.waves

    def _keep(self, said: str, **figures: object) -> None:
        self.found = msgspec.structs.replace(self.found, **figures)
        self._tell(self.found, f"{len(self.found.steps)} updates, {said}")
