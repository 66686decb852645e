"""Measure how much a real model learns on a public leaderboard, with the example `bfcl`.

For each seed `pawl example bfcl` runs as a user runs it. Before that the base model does each
training task once, as the working agent does, so that live rewards can be compared with the base
model's on the same tasks. Ends with status 1 if a bar does not hold; all files are in `var/bfcl`.

    python -m benchmarks.bfcl --model Qwen/Qwen2.5-Coder-0.5B-Instruct
    python -m benchmarks.bfcl --model … --categories multi_turn_base --seeds 1 --recipe air.toml
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from rich.console import Console

from benchmarks.report import Bar, Rows, bars_table
from benchmarks.stack import ROOT
from pawl.judging.answers import metrics_of
from pawl.rollout.journal import DECODER, Begun, Ended
from pawl.scenarios.agent import run_held_out
from pawl.scenarios.scenario import find_scenario, make_tasks, stack_plan
from pawl.stack.stack import running_stack
from store.tenants import task_family

FOLDER: Final = ROOT / "var" / "bfcl"
CATEGORIES: Final = "simple_python,multiple,parallel,irrelevance"
# More than the training tasks of a category: all of them are run once.
EACH: Final = 400
# The bars: the unweighted mean of the categories rises by at least RISE, and no category falls by
# more than FALL; the mean of LIVE live rewards in a row is at most LIVE_FALL below the base's.
RISE, FALL, LIVE, LIVE_FALL = 0.15, 0.03, 768, 0.1


class Run(NamedTuple):
    """The results of one seed: held-out scores and live rewards by category."""

    seed: int
    before: dict[str, float]
    after: dict[str, float]
    live: list[tuple[str, float]]
    summary: dict[str, Any]
    restarts: int

    @property
    def rise(self) -> float:
        return fmean(self.after.values()) - fmean(self.before.values())

    @property
    def fall(self) -> float:
        return max(old - self.after[name] for name, old in self.before.items())

    def live_fall(self, base: dict[str, float]) -> float | None:
        """Return how much lower than the base model's `LIVE` rewards in a row were, at most."""
        gains = list(accumulate((reward - base[name] for name, reward in self.live), initial=0.0))
        windows = [b - a for a, b in zip(gains, gains[LIVE:], strict=False)]
        return -min(windows) / LIVE if windows else None


def main() -> None:
    options = parse_arguments()
    os.environ["BFCL_CATEGORIES"] = options.categories
    console = Console()
    base = asyncio.run(base_rewards(options, console))
    runs = [run_example(seed, options) for seed in options.seeds]
    console.print(table(base, runs).rich())
    bars = [bar for run in runs for bar in bars_of(run, base)]
    console.print(bars_table(bars).rich())
    sys.exit(any(bar.holds is False for bar in bars))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--categories", default=CATEGORIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--out", type=Path, default=FOLDER)
    return parser.parse_args()


async def base_rewards(options: argparse.Namespace, console: Console) -> dict[str, float]:
    """Return the base model's mean reward on the training tasks, by category."""
    scenario = find_scenario("bfcl").model_copy(update={"held_out_samples": 1})
    folder = options.out / "base"
    folder.mkdir(parents=True, exist_ok=True)
    count = EACH * len(options.categories.split(","))
    tasks = await make_tasks(scenario, count, 0, "train", folder)
    # The names of repeated tasks contain a `~`.
    first = [task for task in tasks if "~" not in task.name]
    plan = stack_plan(
        scenario,
        model=options.model,
        is_packaged=False,
        recipe="default",
        rank=1,
        seed=0,
        var=folder,
    )
    async with running_stack(
        plan, lambda waiting: console.print(f"waiting for {waiting}")
    ) as stack:
        await stack.stop_training()
        console.print(f"the base model does {len(first)} tasks")
        exam = await run_held_out(scenario, stack.url, first, folder, name="base")
    return exam.families


def run_example(seed: int, options: argparse.Namespace) -> Run:
    """Run the example, and return its results."""
    folder = options.out.absolute() / f"seed-{seed}"
    command = [sys.executable, "-P", "-m", "pawl.cli", "example", "bfcl", "--model", options.model]
    command += ["--seed", str(seed), "--minutes", str(options.minutes), "--var", str(folder)]
    command += ["--recipe", options.recipe]
    subprocess.run(command, cwd=ROOT, check=True)
    summary = json.loads((folder / "summary.json").read_text())
    looks = [look["families"] for look in summary["held_out"]]
    trainer = (folder / "data" / "logs" / "trainer.log").read_text()
    return Run(
        seed=seed,
        before=looks[0],
        after=looks[-1],
        live=list(
            rewards_in(sorted((folder / "data").glob("train-*.rollout.jsonl"), key=journal_number))
        ),
        summary=summary,
        restarts=trainer.count('"event":"trainer_up"') - 1,
    )


def journal_number(journal: Path) -> int:
    return int(journal.name.partition("-")[2].partition(".")[0])


def rewards_in(journals: Sequence[Path]) -> Iterator[tuple[str, float]]:
    """Yield category and reward of each run at work, in the order in which they ended."""
    for journal in journals:
        tasks: dict[str, str] = {}
        for line in map(DECODER.decode, journal.read_bytes().splitlines()):
            if isinstance(line, Begun):
                tasks[line.episode] = line.key.task
            elif isinstance(line, Ended) and line.outcome != "abandoned":
                reward = metrics_of(line.statements).get("reward", 0.0)
                yield task_family(tasks[line.episode]), reward


def table(base: dict[str, float], runs: Sequence[Run]) -> Rows:
    """Return a table with a line for each seed and category."""
    heads = ["seed", "category", "held out before", "after", "base at work", "episodes", "updates"]
    lines = [
        [
            str(run.seed),
            name,
            f"{old:.3f}",
            f"{run.after[name]:.3f}",
            f"{base[name]:.3f}",
            str(len(run.live)),
            str(run.summary["updates"]),
        ]
        for run in runs
        for name, old in run.before.items()
    ]
    return Rows("BFCL, held out, greedily", heads, lines)


def bars_of(run: Run, base: dict[str, float]) -> list[Bar]:
    return [
        Bar(f"seed {run.seed}: rise of the mean", run.rise, RISE, at_least=True),
        Bar(f"seed {run.seed}: fall of a category", run.fall, FALL),
        Bar(f"seed {run.seed}: {LIVE} live under the base", run.live_fall(base), LIVE_FALL),
        Bar(f"seed {run.seed}: trainers that were killed", run.restarts, 0),
    ]


if __name__ == "__main__":
    main()
