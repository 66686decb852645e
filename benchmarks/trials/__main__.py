"""Run `python -m benchmarks.trials`: is a bad adapter kept from users, and a good one let through?

The demo's agent works on a real stack (vLLM, proxy, steward, PostgreSQL) with a gate. Three
adapters are tried one after the other: a random one, one that was learned from inverted rewards,
and one that was learned from the demo's. At last the world turns around: each reward is 1 less what
it was, so that what serves is worse than the base model. No trainer runs. Exit status: 1 where one
ended otherwise than it should, had more of the traffic, or kept it too long.
"""

import argparse
import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from benchmarks.client_process import ROOT
from benchmarks.proxy.tables import bars_table
from benchmarks.trials.figures import bars, table, turned_bars, turned_table
from benchmarks.trials.run import Options, measure

# What a run writes, its logs among it, until the next run.
VAR: Final = ROOT / "var" / "trials"


def main() -> int:
    """Run, print."""
    given = _parse()
    console = Console(stderr=given.json)
    options = Options(
        good=given.good,
        inverted=given.inverted,
        updates=given.updates,
        minutes=given.minutes,
        strength=given.strength,
        seed=given.seed,
    )
    shutil.rmtree(VAR, ignore_errors=True)
    VAR.mkdir(parents=True)
    came = asyncio.run(measure(options, VAR, ROOT / "var" / "models", console.print))
    promises = [*bars(came.trials, came.rule), *turned_bars(came.turned)]
    for shown in (table(came.trials), turned_table(came.turned), bars_table(promises)):
        console.print(shown.rich())
    if given.json:
        print(json.dumps(msgspec.to_builtins(came)))
    return 0 if all(bar.holds for bar in promises) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trials", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--good", type=Path, help="folder of an adapter of the demo's; without it one is learned"
    )
    parser.add_argument(
        "--inverted",
        type=Path,
        help="folder of an adapter of inverted rewards; without it one is learned",
    )
    parser.add_argument("--updates", type=int, default=4, help="of each that is learned (4)")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="of learning each, and of each trial (15)"
    )
    parser.add_argument(
        "--strength",
        type=float,
        default=400.0,
        help="of the random one, in times a learned one (400)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
