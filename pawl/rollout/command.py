"""Combine the options of `pawl rollout`, and run to the end, or until it is stopped."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from rich.console import Console

from pawl.rollout.agents.agent import Agent
from pawl.rollout.desk import Desk
from pawl.rollout.display import Display
from pawl.rollout.errors import RolloutError
from pawl.rollout.journal_file import JournalFile
from pawl.rollout.judges import RunJudge
from pawl.rollout.options import (
    RolloutOptions,
    agent_of,
    check_files,
    job_of,
    judge_of,
    plan_of,
    policies_of,
    read_tasks,
)
from pawl.rollout.proxy_view import ProxyView
from pawl.rollout.running import Rollout

# So many runs told, and of none had the proxy seen a call: the agent does not call it.
SILENT: Final = 3


async def run_rollout(options: RolloutOptions) -> dict[str, Any]:
    """Run what the journal has not got yet; return the summary.

    Raises:
        RolloutError: it cannot run with these options, or could not go on.
    """
    started = time.monotonic()
    tasks = read_tasks(options)
    path = options.journal or Path(options.tasks.name).with_suffix(".rollout.jsonl")
    check_files(options, path)
    judge = judge_of(options, path)
    agent = agent_of(options, path)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, headers=options.key) as session:
        view = ProxyView(session, options.url, options.metrics_url)
        models = await view.check(options.tenant)
        journal = JournalFile(path)
        try:
            policies = policies_of(options, models, journal.plan())
            past = journal.open_plan(plan_of(options, tasks, policies), again=options.again)
            desk = Desk(session, f"{options.url}/feedback")
            job = job_of(options, tasks, policies)
            rollout = Rollout(job, agent, judge, journal, desk, view)
            async with (
                running(agent, judge, options.at_once),
                _stopped_by_signals(rollout.stop),
                _beside(rollout, view, desk),
            ):
                await rollout.run(past)
        finally:
            journal.close()
    summary = _summary(rollout, path, time.monotonic() - started, _hint(rollout, desk))
    if options.summary is not None:
        _write(options.summary, summary)
    return summary


@asynccontextmanager
async def running(agent: Agent, judge: RunJudge, at_once: int) -> AsyncIterator[None]:
    """Have agent and judge ready; end all that they started when the block is left.

    Raises:
        RolloutError: one of them cannot be run.
    """
    try:
        await agent.start(at_once)
        await judge.start()
        yield
    finally:
        await agent.stop()
        await judge.stop()


@asynccontextmanager
async def _stopped_by_signals(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Stop on Ctrl-C, and give up what is under way on a second one, or on SIGTERM."""
    loop = asyncio.get_running_loop()

    def give_up() -> None:
        stop()
        stop()

    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGTERM, give_up)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


@asynccontextmanager
async def _beside(rollout: Rollout, view: ProxyView, desk: Desk) -> AsyncIterator[None]:
    """Look at the proxy, and show the rollout, while it runs."""
    display = Display(rollout, view, desk, Console(stderr=True))
    work = (view.watch(), view.read(), display.show())
    beside = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)


def _hint(rollout: Rollout, desk: Desk) -> str | None:
    told = rollout.figures.all.runs
    if desk.taken >= SILENT and not desk.seen and told:
        return (
            "the proxy has seen no call of any run: the agent must read OPENAI_BASE_URL (or "
            "ANTHROPIC_BASE_URL) in each run, and call it"
        )
    return None


def _summary(rollout: Rollout, journal: Path, seconds: float, hint: str | None) -> dict[str, Any]:
    told = {"untold": rollout.untold, "journal": str(journal), "hint": hint}
    return rollout.figures.summary(seconds) | told


def _write(path: Path, summary: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise RolloutError(f"--summary: {path} cannot be written: {error}") from error
