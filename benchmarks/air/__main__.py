"""Measure what AIR is worth on a toy task, and what easy tool calls gain by it.

A tiny policy (two layers that have read clumsy work for half a minute) learns to use three tools,
with the product's credit and learner. On `sparse` the right end alone is rewarded, and rarely
reached; on `easy` a tool that always works competes with the task. docs/explanation/air.md
says what this shows, and what not. Ends with status 1 where a bar does not hold.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from rich.console import Console

from benchmarks.air.figures import (
    Curves,
    bars,
    easy_table,
    median_ratio,
    reach_table,
    reaches,
)
from benchmarks.air.picture import draw
from benchmarks.air.runs import BASE_STEPS, run_worlds
from benchmarks.air.worlds import EASY, SPARSE
from benchmarks.proxy.figures import Bar
from benchmarks.proxy.page import with_figures
from benchmarks.proxy.tables import Rows, bars_table

PAGE: Final = Path("docs/explanation/air.md")
PICTURE: Final = Path("docs/images/air.png")
# The bars are judged by the first; the others check that these are no lucky ones.
SEEDS: Final = (1, 2, 3, 4, 5)
OTHER_SEEDS: Final = (6, 7, 8, 9, 10)
QUICK_WAVES: Final = 6
QUICK_BASE_STEPS: Final = 100


def main() -> None:
    """Parse, run, print, write."""
    options = _options()
    console = Console(stderr=options.json)
    worlds, base_steps = [SPARSE, EASY], BASE_STEPS
    seeds, others = options.seeds, options.other_seeds
    if options.quick:
        worlds = [replace(world, waves=QUICK_WAVES) for world in worlds]
        seeds, others, base_steps = seeds[:1], [], QUICK_BASE_STEPS
    started = perf_counter()
    with tempfile.TemporaryDirectory(prefix="pawl-air-") as folder:
        found = run_worlds(
            worlds, [*seeds, *others], base_steps, options.jobs, Path(folder), console.print
        )
    seconds = perf_counter() - started
    judged, checked = _of(found, seeds), _of(found, others)
    promises = bars(judged)
    tables = _tables(judged, checked, promises)
    for table in tables:
        console.print(table.rich())
    console.print(f"{seconds:.0f} s")
    if options.write:
        PAGE.write_text(with_figures(PAGE.read_text(), tables, _machine(seconds), PICTURE))
        draw(PICTURE, judged)
        console.print(f"written: {PAGE}, {PICTURE}")
    if options.json:
        print(json.dumps(_as_json(judged, checked, promises, seconds)))
    sys.exit(0 if options.quick or all(bar.holds for bar in promises) else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.air", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=_numbers, default=list(SEEDS), help="judged (1,2,3,4,5)")
    parser.add_argument(
        "--other-seeds", type=_numbers, default=list(OTHER_SEEDS), help="a check (6,7,8,9,10)"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, short: does it run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at once (one a core)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} and {PICTURE}")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--quick has no figures to --write: leave one of them out")
    return options


def _numbers(given: str) -> list[int]:
    return [int(number) for number in given.split(",") if number]


def _of(found: dict[str, Curves], seeds: Sequence[int]) -> dict[str, Curves]:
    """Return the curves of these seeds."""
    return {
        world: {arm: {seed: own[seed] for seed in seeds} for arm, own in curves.items()}
        for world, curves in found.items()
    }


def _tables(
    judged: dict[str, Curves], checked: dict[str, Curves], promises: Sequence[Bar]
) -> list[Rows]:
    tables = [
        reach_table("Sparse reward", reaches(judged[SPARSE.name])),
        easy_table("An easy tool beside the task", judged[EASY.name]),
        bars_table(promises),
    ]
    if any(checked[SPARSE.name].values()):
        tables += [
            reach_table("Sparse reward, other seeds", reaches(checked[SPARSE.name])),
            easy_table("An easy tool, other seeds", checked[EASY.name]),
        ]
    return tables


def _machine(seconds: float) -> str:
    python = sys.version.split()[0]
    return f"{os.cpu_count()} cores, Python {python}, {date.today()}, in {seconds:.0f} s"


def _as_json(
    judged: dict[str, Curves], checked: dict[str, Curves], promises: Sequence[Bar], seconds: float
) -> dict[str, Any]:
    return {
        "bars": {bar.name: asdict(bar) | {"holds": bar.holds} for bar in promises},
        "seeds": [asdict(reach) | {"ratio": reach.ratio} for reach in reaches(judged[SPARSE.name])],
        "other_seeds": [
            asdict(reach) | {"ratio": reach.ratio} for reach in reaches(checked[SPARSE.name])
        ],
        "other_seeds_ratio": median_ratio(reaches(checked[SPARSE.name])),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
