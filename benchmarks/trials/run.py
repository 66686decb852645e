"""Try adapters on live traffic, one after the other, on a whole stack of their own."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.small_stack import small_plan
from benchmarks.trials.figures import GOOD, INVERTED, RANDOM, Trial, trial_of
from benchmarks.trials.ledger import begun, events
from benchmarks.trials.making import (
    UPSIDE_DOWN,
    Learning,
    learned,
    write_inverted,
    write_random,
)
from benchmarks.trials.turning import Turned, sufficed_at, turned_of
from pawl.rollout.tasks import Task
from pawl.scenarios.agent import WorkingAgent
from pawl.scenarios.places import EXAMPLES, find_scenario
from pawl.scenarios.run import DEMO
from pawl.scenarios.scenario import Scenario
from pawl.scenarios.tasks import make_tasks
from pawl.stack.model import unpacked_model
from pawl.stack.stack import Stack, running_stack
from pawl.steward.evidence import rule_of
from pawl.steward.gate.records import GateOptions
from store.connection.engine import make_engine
from store.read.standing import gated, promotion
from store.records import Record
from store.version_queries import numbered_version
from store.versions import PolicyState
from trainer.importing import import_adapter
from trainer.recipes.recipe import load_recipe
from trainer.settings import TrainerSettings

POLICY: Final = "calculator"
# The demo's recipe with a gate. An episode is one call, of a second or two, judged at once.
GATE: Final = """
[gate]
mode = "gated"
canary_share = 0.3
base_share = 0.1
reward_delay_s = 30.0
deadline_s = 1800.0
replay_states = 16
"""
# States in which a version is still on its way.
ON_TRIAL: Final[tuple[PolicyState, ...]] = ("written", "candidate", "canary")
# Runs of the agent before the first trial, at a time, and after each.
BEFORE: Final = 256
AT_A_TIME: Final = 64
AFTER: Final = 64
MOST_RUNS: Final = 10_000
Tell = Callable[[str], None]


class Options(Record, frozen=True, kw_only=True):
    """Set how a run is.

    Attributes:
        good: an adapter that was learned before, or None to learn one.
        inverted: one that was learned from inverted rewards, or None to learn one.
        updates: how long each is learned.
        minutes: of learning each, and of each trial, at most.
        strength: how many times as large as a learned one the random adapter is.
        seed: of tasks, of the adapters' first weights, and of the random one.
    """

    good: Path | None
    inverted: Path | None
    updates: int
    minutes: float
    strength: float
    seed: int


class Outcome(Record, frozen=True, kw_only=True):
    """Hold what came of the trials, and of the good adapter as it turned bad, and the gate's rule.

    `turned` is None if the good adapter was not promoted.
    """

    trials: list[Trial]
    turned: Turned | None
    rule: GateOptions


class NoEnd(Exception):
    """Report that a trial did not end in its time."""


async def measure(options: Options, folder: Path, models: Path, tell: Tell) -> Outcome:
    """Make the adapters and try each, and let what serves at the end turn bad.

    `folder` holds all that the run writes.

    Raises:
        ScenarioFailed: an adapter could not be learned, or the agent could not go on.
        NotReady, ProcessFailed: the stack cannot run here.
        NoEnd: see there.
        TrainerError: an adapter could not be imported.
    """
    adapters = await _adapters(options, folder, models)
    recipe = folder / "trials.toml"
    recipe.write_text((files("trainer.recipes") / "demo.toml").read_text() + GATE)
    model = await asyncio.to_thread(unpacked_model, models)
    plan = small_plan(folder / "data", str(model), POLICY, str(recipe))
    async with running_stack(plan, lambda names: tell(f"waiting for {names}")) as stack:
        # Whoever imports is alone on the policy; the steward decides without a trainer.
        await stack.stop_training()
        engine = make_engine(stack.database_url)
        try:
            trials = Trials(stack, engine, options, tell)
            return await trials.run(adapters, find_scenario(UPSIDE_DOWN, folder / "examples"))
        finally:
            await engine.dispose()


async def _adapters(options: Options, folder: Path, models: Path) -> dict[str, Path]:
    """Return the folders of the adapters, the worst first."""
    learning = Learning(updates=options.updates, minutes=options.minutes, seed=options.seed)
    examples = folder / "examples"
    # Its judge is what the world turns to at the end, too.
    write_inverted(examples)
    good, inverted = options.good, options.inverted
    if good is None:
        good = await learned(DEMO, POLICY, learning, EXAMPLES, folder / DEMO, models)
    if inverted is None:
        inverted = await learned(
            UPSIDE_DOWN, POLICY, learning, examples, folder / UPSIDE_DOWN, models
        )
    drawn = folder / "random"
    await asyncio.to_thread(write_random, good, drawn, options.strength, options.seed)
    return {RANDOM: drawn, INVERTED: inverted, GOOD: good}


class Trials:
    """Try adapters while the demo's agent works."""

    def __init__(self, stack: Stack, engine: AsyncEngine, options: Options, tell: Tell) -> None:
        """Store what runs, and whom to tell of each step."""
        plan = stack.plan
        self._engine = engine
        self._options = options
        self._tell = tell
        self._folder = plan.data_dir
        self._url = stack.url
        self._agent: WorkingAgent | None = None
        self._settings = TrainerSettings.model_validate(
            {
                "database_url": stack.database_url,
                "upstream_url": f"http://127.0.0.1:{plan.vllm.port}/v1",
                "adapter_dir": plan.adapter_dir.resolve(),
                "recipe": plan.recipe,
                "policy": POLICY,
                "model": plan.model,
            }
        )
        self._rule = rule_of(load_recipe(plan.recipe).gate.model_dump(mode="json"))
        self._asked = 0
        self._tasks: tuple[Task, ...] = ()

    async def run(self, adapters: Mapping[str, Path], turned: Scenario) -> Outcome:
        """Let the agent work without a trial, try each adapter, then have what serves turn bad.

        `turned` is the same agent with the judge that has it turn bad.
        """
        demo, count, seed = find_scenario(DEMO), MOST_RUNS, self._options.seed
        self._tasks = await make_tasks(demo, count, seed, "train", self._folder)
        versions: dict[str, int] = {}
        async with self._working(demo):
            self._tell("the base model works")
            await self._work(BEFORE)
            for name, directory in adapters.items():
                versions[name] = await self._try(name, directory)
                await self._work(AFTER)
        trials = await self._trials(versions)
        async with self._working(turned):
            bad = await self._turn(versions[GOOD])
        return Outcome(trials=trials, turned=bad, rule=self._rule)

    async def _trials(self, versions: Mapping[str, int]) -> list[Trial]:
        """Return what the ledger says of each version's trial."""
        episodes = await begun(self._engine, POLICY)
        told = {name: await events(self._engine, POLICY, one) for name, one in versions.items()}
        tried = (one.at for of_it in told.values() for one in of_it if one.to_state == "canary")
        # As many tasks as there are: the first few hundred may be easier than those after them.
        first = min(tried, default=datetime.now(UTC))
        return [
            trial_of(name, versions[name], of_it, episodes, first, self._rule)
            for name, of_it in told.items()
        ]

    @asynccontextmanager
    async def _working(self, scenario: Scenario) -> AsyncIterator[None]:
        """Have the scenario's agent at work."""
        agent = WorkingAgent(scenario, self._url, self._folder, name=scenario.name)
        await agent.start(samples=1, concurrency=scenario.at_once)
        self._agent = agent
        try:
            yield
        finally:
            await agent.stop()

    async def _try(self, name: str, directory: Path) -> int:
        """Import an adapter, and work until it is decided about; return its version.

        Raises:
            NoEnd: it is not, in the time that there is.
        """
        self._tell(f"{name}: importing {directory}")
        version = await import_adapter(self._settings, self._engine, POLICY, directory)
        await self._until(version.version, name, ON_TRIAL)
        return version.version

    async def _turn(self, version: int) -> Turned | None:
        """Work until the version is rolled back; return what came of it, None if it never served.

        Raises:
            NoEnd: it still serves, when the time is over.
        """
        async with self._engine.connect() as connection:
            stands = await gated(connection, POLICY)
            promoted = await promotion(connection, POLICY, version)
        if stands is None or promoted is None or stands.serving.version.version != version:
            return None
        await self._until(version, "what served well turns bad", ("serving",))
        end = (await events(self._engine, POLICY, version))[-1]
        async with self._engine.connect() as connection:
            now = await gated(connection, POLICY)
        assert now is not None
        serves = now.serving.version.served_name
        sufficed = await sufficed_at(self._engine, stands, promoted, end.at)
        all_of_them = await begun(self._engine, POLICY)
        return turned_of(version, end, serves, stands.now, sufficed, all_of_them)

    async def _until(self, version: int, name: str, states: Sequence[PolicyState]) -> None:
        """Work for as long as the version has one of these states.

        Raises:
            NoEnd: it has one when the time is over.
        """
        deadline = time.monotonic() + 60.0 * self._options.minutes
        while (state := await self._state(version)) in states:
            if time.monotonic() > deadline:
                raise NoEnd(
                    f"{name}: still {state!r} after {self._options.minutes:g} minutes: see the"
                    f" logs in {self._folder / 'logs'}, or give it more with --minutes"
                )
            self._tell(f"{name}: {state}, {self._asked} runs")
            await self._work(AT_A_TIME)

    async def _state(self, version: int) -> PolicyState:
        async with self._engine.connect() as connection:
            now = await numbered_version(connection, POLICY, version)
        assert now is not None
        return now.state

    async def _work(self, runs: int) -> None:
        """Give the agent so many tasks, and wait until they are answered and judged."""
        tasks = self._tasks[self._asked : self._asked + runs]
        if len(tasks) < runs:
            raise NoEnd(f"the {MOST_RUNS} tasks are used up: what is tried is not decided about")
        self._asked += runs
        assert self._agent is not None
        self._agent.ask(tasks)
        await self._agent.finish()
        self._agent.collect()
