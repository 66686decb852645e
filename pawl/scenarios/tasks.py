"""Have a scenario's own program make its tasks, in a file."""

import asyncio
import sys
from pathlib import Path
from typing import Literal

from pawl.rollout.tasks import Task, parse_tasks
from pawl.scenarios.errors import ScenarioFailed
from pawl.scenarios.scenario import Scenario

TaskSplit = Literal["train", "held-out"]


async def make_tasks(
    scenario: Scenario, count: int, seed: int, split: TaskSplit, folder: Path
) -> tuple[Task, ...]:
    """Write `count` tasks with their answers to a file in `folder`, and return them.

    Args:
        scenario: whose tasks.
        count: number of tasks.
        seed: random seed of the tasks.
        split: no task is in both.
        folder: where the file is written.

    Raises:
        ScenarioFailed: the program failed, or what it printed is no file of tasks.
    """
    program, *arguments = scenario.tasks
    options = ["--count", str(count), "--seed", str(seed), "--split", split]
    printed = await _run([sys.executable, str(scenario.folder / program), *arguments, *options])
    (folder / f"{split}.jsonl").write_bytes(printed)
    tasks = parse_tasks(printed, program, scenario.answer)
    if len(tasks) < count:
        raise ScenarioFailed(f"{program} made {len(tasks)} tasks of {count}")
    return tasks


async def _run(command: list[str]) -> bytes:
    """Run a program to its end, and return its standard output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode:
        errors = err.decode(errors="replace")[-800:]
        raise ScenarioFailed(f"{Path(command[1]).name} failed: {errors}")
    return out
