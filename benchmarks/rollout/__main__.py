"""Run `python -m benchmarks.rollout`: 1,000 episodes, 16 at once, warm workers, a fake upstream.

Once to the end, for what the runner costs: its own CPU time, without its workers. Once killed with
`kill -9` again and again, and resumed, for what the ledger has of it: each run must have one
episode with one reward. `pawl proxy` with two workers and an embedded PostgreSQL are real. Exit
status: 1 where a run is lost or doubled, or the runner takes more than 5 ms an episode.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from benchmarks.chaos.stand import Stand, standing
from pawl.rollout.journal import replay
from store.connection.engine import make_engine

ROOT = Path(__file__).parents[2]
SAMPLES = 8
AT_ONCE = 16
MOST_MS = 5.0
LOOK_S = 0.02
EPISODES = """
    SELECT e.key, e.task, count(f.id) FILTER (WHERE f.metric = 'reward') AS rewards,
           count(f.id) FILTER (WHERE f.metric = 'run_abandoned') AS abandoned
    FROM episodes e LEFT JOIN feedback f ON f.target_kind = 'episode' AND f.target = e.key
    WHERE e.task LIKE :tasks GROUP BY e.key, e.task
"""


@dataclass
class Cost:
    """Hold CPU seconds of a runner, before it began to run and then, and those of its workers."""

    seconds: float = 0.0
    start: float = 0.0
    own: float = 0.0
    workers: float = 0.0


@dataclass
class Ledger:
    """Count what PostgreSQL has of a rollout."""

    runs: int
    lost: int
    doubled: int
    twice_rewarded: int
    abandoned: int
    calls_without_end: int


class Bench:
    """Keep tasks, a journal, and the command that runs them."""

    def __init__(self, stand: Stand, folder: Path, name: str, tasks: int) -> None:
        self._stand = stand
        self._file = folder / f"{name}.jsonl"
        self.name = name
        self.tasks = tasks
        self.journal = folder / f"{name}.journal"
        lines = [
            json.dumps({"id": f"{name}-{number}", "question": f"What is {number}?", "answer": "x"})
            for number in range(tasks)
        ]
        self._file.write_text("\n".join(lines) + "\n")

    def start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "pawl.cli", "rollout"]
        command += ["--tasks", str(self._file), "--journal", str(self.journal)]
        command += ["--python", "benchmarks.rollout.agent:answer", "--answer", "answer"]
        command += ["-n", str(SAMPLES), "-k", str(AT_ONCE)]
        command += ["--url", f"http://127.0.0.1:{self._stand.port}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        environment["PAWL_ADMIN_LISTEN"] = f"127.0.0.1:{self._stand.admin}"
        log = self.journal.with_suffix(".err")
        with log.open("ab") as errors:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors
            )

    def settled(self) -> int:
        if not self.journal.exists():
            return 0
        with self.journal.open("rb") as lines:
            return len(replay(lines, str(self.journal)).settled)

    def begun(self) -> bool:
        return self.journal.exists() and b'"begun"' in self.journal.read_bytes()[:10_000]


def measured(bench: Bench) -> Cost:
    """Run to the end; the CPU times are those that were seen last before it."""
    cost, started = Cost(), time.monotonic()
    runner = bench.start()
    process = psutil.Process(runner.pid)
    while runner.poll() is None:
        try:
            used = process.cpu_times()
            workers = [one.cpu_times() for one in process.children()]
        except psutil.Error:
            break
        cost.own = used.user + used.system
        cost.workers = max(cost.workers, sum(one.user + one.system for one in workers))
        if not cost.start and bench.begun():
            cost.start, started = cost.own, time.monotonic()
        time.sleep(LOOK_S)
    assert runner.wait() == 0, f"the rollout ended with status {runner.returncode}"
    cost.seconds = time.monotonic() - started
    return cost


def killed_and_resumed(bench: Bench, kills: int, seed: int) -> int:
    """Run, killed at chance moments, until all is done; return how often it was killed."""
    chance, done = random.Random(seed), 0
    runs = bench.tasks * SAMPLES
    moments = sorted(chance.randrange(runs) for _ in range(kills))
    for moment in moments:
        runner = bench.start()
        while bench.settled() <= moment and runner.poll() is None:
            time.sleep(LOOK_S)
        if runner.poll() is None:
            os.kill(runner.pid, signal.SIGKILL)
            done += 1
        runner.wait()
    runner = bench.start()
    assert runner.wait() == 0, f"the rollout ended with status {runner.returncode}"
    return done


async def ledger(stand: Stand, bench: Bench) -> Ledger:
    """Look at what is stored, once it does not grow any more."""
    engine = make_engine(stand.url)
    rows: list[Any] = []
    try:
        while True:
            async with engine.connect() as connection:
                found = await connection.execute(text(EPISODES), {"tasks": f"{bench.name}-%"})
                before, rows = rows, list(found)
            if rows and rows == before:
                break
            await asyncio.sleep(2)
    finally:
        await engine.dispose()
    rewarded = Counter(row.task for row in rows if row.rewards)
    wanted = {f"{bench.name}-{number}" for number in range(bench.tasks)}
    return Ledger(
        runs=sum(rewarded.values()),
        lost=sum(max(0, SAMPLES - rewarded[task]) for task in wanted),
        doubled=sum(max(0, rewarded[task] - SAMPLES) for task in wanted),
        twice_rewarded=sum(row.rewards > 1 for row in rows),
        abandoned=sum(row.abandoned > 0 for row in rows),
        calls_without_end=sum(not (row.rewards or row.abandoned) for row in rows),
    )


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tasks = options.episodes // SAMPLES
    with standing(folder, 2) as stand:
        await stand.ready()
        plain, broken = Bench(stand, folder, "plain", tasks), Bench(stand, folder, "broken", tasks)
        cost = await asyncio.to_thread(measured, plain)
        kills = await asyncio.to_thread(killed_and_resumed, broken, options.kills, options.seed)
        whole, resumed = await ledger(stand, plain), await ledger(stand, broken)
    runs = tasks * SAMPLES
    return {
        "episodes": runs,
        "runner_ms": round(1000 * (cost.own - cost.start) / runs, 2),
        "runner_ms_with_start": round(1000 * cost.own / runs, 2),
        "workers_ms": round(1000 * cost.workers / runs, 2),
        "episodes_a_second": round(runs / cost.seconds, 1),
        "kills": kills,
        "plain": vars(whole),
        "resumed": vars(resumed),
    }


def is_right(found: dict[str, Any]) -> bool:
    whole = all(
        one["runs"] == found["episodes"]
        and not (one["lost"] or one["doubled"] or one["twice_rewarded"] or one["calls_without_end"])
        for one in (found["plain"], found["resumed"])
    )
    return whole and found["runner_ms_with_start"] <= MOST_MS


def show(found: dict[str, Any]) -> None:
    table = Table("figure", "value")
    for name, value in found.items():
        if isinstance(value, dict):
            for part, count in value.items():
                table.add_row(f"{name}: {part.replace('_', ' ')}", str(count))
        else:
            table.add_row(name.replace("_", " "), str(value))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if is_right(found) else 1


if __name__ == "__main__":
    sys.exit(main())
