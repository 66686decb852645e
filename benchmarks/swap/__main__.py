"""Run `python -m benchmarks.swap`: does a client notice that adapters are swapped?

Clients stream multi-call episodes through a real proxy from a real vLLM, while version after
version is published as the trainer does: turns of a minute with loads, and turns without. Exit
status: 1 where a call failed, streams paused, an episode changed its version, or loads were not
made or exceeded the adapter slots.
"""

import argparse
import asyncio
import json
import shutil
import sys
from typing import Final

import msgspec
from rich.console import Console

from benchmarks.report import bars_table
from benchmarks.stack import ROOT
from benchmarks.swap.figures import bars, tables
from benchmarks.swap.run import RETIRE_AFTER_S, Options, measure
from trainer.settings import USUAL_SLOTS

# What a run writes, its logs among it, until the next run.
VAR: Final = ROOT / "var" / "swap"


def main() -> int:
    """Run, print."""
    given = _parse()
    console = Console(stderr=given.json)
    options = Options(
        minutes=given.minutes,
        loads=given.loads,
        streams=given.streams,
        layers=given.layers,
        slots=given.slots,
        retire_after_s=given.retire_after,
    )
    shutil.rmtree(VAR, ignore_errors=True)
    VAR.mkdir(parents=True)
    with console.status("starting") as status:
        found = asyncio.run(measure(options, VAR, ROOT / "var" / "models", status.update))
    promises = bars(found)
    for table in [*tables(found), bars_table(promises)]:
        console.print(table.rich())
    if given.json:
        print(json.dumps(msgspec.to_builtins(found) | {"ratio": found.ratio}))
    return 0 if all(bar.holds for bar in promises) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swap", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of all turns (10)")
    parser.add_argument("--loads", type=int, default=60, help="of all turns (60)")
    parser.add_argument("--streams", type=int, default=32, help="at once (32)")
    parser.add_argument("--layers", type=int, default=4, help="of the packaged model's 30 (4)")
    parser.add_argument(
        "--slots", type=int, default=USUAL_SLOTS, help=f"vLLM's --max-loras ({USUAL_SLOTS})"
    )
    parser.add_argument(
        "--retire-after",
        type=float,
        default=RETIRE_AFTER_S,
        help=f"publish.retire_after_s, in seconds ({RETIRE_AFTER_S:g}): longer than two calls",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
