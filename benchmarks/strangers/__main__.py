"""Measure whether the packaged recipe learns six tasks that no example resembles.

For each, `pawl up` starts as it is, with no setting but its ports. An agent of some framework is
asked the held-out tasks, then works on its own as fast as the machine allows, a reward for each
episode, and is asked the held-out tasks again. With `--once` no task comes twice; without, each is
tried eight times. A run's episodes and logs lie in its folder below `var/strangers`. Ends with
status 1 where a bar does not hold.

    python -m benchmarks.strangers --only desk unit --seeds 1 --once
    python -m benchmarks.strangers --checkout ../pawl-of-last-year
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.progress import Progress

from benchmarks.report import Bar, Rows, bars_table, number
from benchmarks.stack import ROOT, free_port, running, wait_for
from benchmarks.strangers.tasks import STRANGERS

FOLDER: Final = ROOT / "var" / "strangers"
PYTHON: Final = ROOT / ".venv-clients" / "bin" / "python"
WORK: Final = Path(__file__).with_name("work.py")
EPISODES: Final = 1500
HELD_OUT: Final = 240
ATTEMPTS: Final = 8
# Live rewards are averaged over so many episodes.
BLOCK: Final = 300
READY_S: Final = 600.0
# The trainer is given so long to begin with the last episodes, and ends the update that it is in.
SETTLES_S: Final = 20.0
# The bars: held-out reward rises by so much, or to so much; live means fall by at most so much;
# asked once, tasks teach this share of what they teach when they are tried eight times.
RISE, HIGH, FALL, ONCE_SHARE = 0.35, 0.85, 0.1, 0.8


class Run(NamedTuple):
    """Hold what one run gave: rewards of the held-out tasks by family, and of live blocks."""

    stranger: str
    once: bool
    seed: int
    before: dict[str, list[float]]
    after: dict[str, list[float]]
    live: list[float]
    updates: int
    waits: int
    minutes: float

    @property
    def rise(self) -> float:
        return mean_of(self.after) - mean_of(self.before)

    @property
    def fall(self) -> float:
        """Return by how much a live mean was below the best one before it."""
        best = accumulate(self.live, max)
        return max(high - mean for high, mean in zip(best, self.live, strict=True))

    @property
    def lower_families(self) -> list[str]:
        """Return the families whose held-out reward is lower than before, by a 95 % interval."""
        return [name for name, old in self.before.items() if is_lower(old, self.after[name])]


def mean_of(rewards: dict[str, list[float]]) -> float:
    return fmean(fmean(family) for family in rewards.values())


def is_lower(before: Sequence[float], after: Sequence[float]) -> bool:
    error = sqrt(variance(before) / len(before) + variance(after) / len(after))
    return fmean(after) - fmean(before) < -1.96 * error


def main() -> None:
    options = parse_arguments()
    console = Console()
    runs = []
    with Progress(console=console) as progress:
        for seed in options.seeds:
            for stranger in options.only:
                for once in (False, True) if options.once is None else (options.once,):
                    runs.append(measure_run(stranger, seed, once, options, progress))
                    console.print(table(runs[-1:]).rich())
    console.print(table(runs).rich())
    bars = bars_of(runs)
    console.print(bars_table(bars).rich())
    sys.exit(any(bar.holds is False for bar in bars))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=STRANGERS, default=list(STRANGERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument(
        "--once", action=argparse.BooleanOptionalAction, help="default: both, one after the other"
    )
    parser.add_argument(
        "--a-minute",
        type=float,
        help="live episodes, where the machine makes more than its trainer can follow; default:"
        " as many as it can",
    )
    parser.add_argument("--recipe", help="default: what `pawl up` uses")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose `pawl up` it is")
    parser.add_argument("--out", type=Path, default=FOLDER)
    return parser.parse_args()


def measure_run(
    stranger: str, seed: int, once: bool, options: argparse.Namespace, progress: Progress
) -> Run:
    """Run `pawl up` and one agent, and return what it learned."""
    folder = options.out.absolute() / f"{stranger}-{'once' if once else 'again'}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()

    def work(name: str, episodes: int, *arguments: str) -> list[dict[str, Any]]:
        out = folder / f"{name}.jsonl"
        command = [PYTHON, WORK, stranger, "--url", url, "--out", out, "--seed", str(seed)]
        command += ["--episodes", str(episodes), *arguments]
        shown = progress.add_task(f"{folder.name} {name}", total=episodes)
        with running(command, folder / f"{name}.log") as agent:
            ends = False
            while not ends:
                ends = agent.poll() is not None
                lines = out.read_text().splitlines() if out.exists() else []
                rewards = [json.loads(line)["reward"] for line in lines[-BLOCK:]]
                reward = number(fmean(rewards) if rewards else None, 2)
                about = f"{folder.name} {name}, reward {reward}"
                progress.update(shown, completed=len(lines), description=about)
                time.sleep(0 if ends else 1)
        progress.remove_task(shown)
        if agent.returncode:
            sys.exit(f"the agent ended with an error: {folder / name}.log")
        return [json.loads(line) for line in lines]

    with running_stack(folder, options) as url:
        before = work("before", HELD_OUT, "--held-out", "--attempts", "1")
        pace = ["--a-minute", str(options.a_minute)] if options.a_minute else []
        live = work("live", options.episodes, "--attempts", "1" if once else str(ATTEMPTS), *pace)
        trainer = folder / "var" / "logs" / "trainer.log"
        wait_until_idle(trainer)
        after = work("after", HELD_OUT, "--held-out", "--attempts", "1")
    rewards = [line["reward"] for line in live]
    return Run(
        stranger,
        once,
        seed,
        by_family(before),
        by_family(after),
        [fmean(rewards[at : at + BLOCK]) for at in range(0, len(rewards), BLOCK)],
        count_events(trainer, "update_done"),
        count_events(trainer, "training_paused"),
        (time.monotonic() - began) / 60,
    )


@contextmanager
def running_stack(
    folder: Path, options: argparse.Namespace, more: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run `pawl up` in a folder of its own, with `more` settings; yield the proxy's address."""
    models = ROOT / "var" / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "var").mkdir()
    (folder / "var" / "models").symlink_to(models)
    port = free_port()
    settings = {
        "PYTHONPATH": str(options.checkout.absolute()),
        "PYTHONSAFEPATH": "1",
        "PAWL_LISTEN": f"127.0.0.1:{port}",
        "PAWL_VLLM_PORT": str(free_port()),
        "PAWL_SEED": "0",
        **(more or {}),
    }
    for name in ("ADMIN", "TRAINER", "CONTROLLER", "CONSOLE"):
        settings[f"PAWL_{name}_LISTEN"] = f"127.0.0.1:{free_port()}"
    if options.recipe is not None:
        path = Path(options.recipe)
        settings["PAWL_RECIPE"] = str(path.absolute()) if path.exists() else options.recipe
    log = folder / "up.log"
    # `pawl up` reads settings from the folder's `.env`, and writes into its `var`.
    command = ["env", "--chdir", str(folder), sys.executable, "-m", "pawl.cli", "up"]
    with running(command, log, settings) as process:
        wait_for(lambda: "Pawl is up" in log.read_text(), process, log, READY_S)
        yield f"http://127.0.0.1:{port}"


def count_events(log: Path, name: str) -> int:
    return sum(f'"event":"{name}"' in line for line in log.read_text().splitlines())


def wait_until_idle(log: Path) -> None:
    """Wait until no update is under way, and some seconds for the server to load its version."""
    time.sleep(SETTLES_S)
    while is_in_an_update(log):
        time.sleep(1)
    time.sleep(SETTLES_S)


def is_in_an_update(log: Path) -> bool:
    """Return whether the newest update is under way: it may also be released, or fail."""
    lines = log.read_text().splitlines()
    about = [line for line in lines if re.search('"event":"update_(?!shortened)', line)]
    return bool(about) and '"event":"update_begun"' in about[-1]


def by_family(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    families: dict[str, list[float]] = {}
    for line in lines:
        families.setdefault(line["family"], []).append(line["reward"])
    return families


def table(runs: Sequence[Run]) -> Rows:
    """Return a line a run: held-out reward before and after, by family, and live means."""
    heads = ["", "seed", "tasks", "held out", "families", "live", "updates", "waits", "minutes"]
    lines = [
        [
            run.stranger,
            str(run.seed),
            "once" if run.once else f"× {ATTEMPTS}",
            f"{mean_of(run.before):.2f} → {mean_of(run.after):.2f}",
            ", ".join(
                f"{name} {fmean(old):.2f} → {fmean(run.after[name]):.2f}"
                for name, old in sorted(run.before.items())
            ),
            " ".join(f"{mean:.2f}" for mean in run.live),
            str(run.updates),
            str(run.waits),
            f"{run.minutes:.1f}",
        ]
        for run in runs
    ]
    return Rows("Strangers", heads, lines, [f"live: means of {BLOCK} episodes each"])


def bars_of(runs: Sequence[Run]) -> list[Bar]:
    bars = []
    for run in runs:
        name = f"{run.stranger} {run.seed}{' once' if run.once else ''}"
        if not run.once:
            is_high = mean_of(run.after) >= HIGH
            bars.append(Bar(f"{name}: rise", RISE if is_high else run.rise, RISE, at_least=True))
        else:
            same = [
                other.rise
                for other in runs
                if (other.stranger, other.seed, other.once) == (run.stranger, run.seed, False)
            ]
            share = run.rise / same[0] if same else None
            bars.append(Bar(f"{name}: share of the rise", share, ONCE_SHARE, at_least=True))
        bars.append(Bar(f"{name}: families lower", len(run.lower_families), 0))
        bars.append(Bar(f"{name}: fall of live means", run.fall, FALL))
        bars.append(Bar(f"{name}: waits for a slot", run.waits, 0))
    return bars


if __name__ == "__main__":
    main()
