"""Run `python -m benchmarks.durations`: are long episodes trained that a judge scores late?

Simulates a day of 100,000 episodes of 2 to 30 minutes, scored up to ten minutes after their end,
with the product's rules and with those that it had before: no model, no database, the same figures
for the same seed. docs/explanation/durations.md says what this shows, and what not. Ends with
status 1 where a bar does not hold.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
from rich.console import Console

from benchmarks.durations.day import BEFORE, Machine, rules_now, run_day
from benchmarks.durations.figures import bars, figures, tables
from benchmarks.durations.load import DAY_S, Load
from benchmarks.durations.picture import draw
from benchmarks.proxy.page import with_figures
from benchmarks.proxy.tables import bars_table
from trainer.recipes.recipe import load_recipe
from trainer.settings import USUAL_SLOTS

PAGE: Final = Path("docs/explanation/durations.md")
PICTURE: Final = Path("docs/images/durations.png")


def main() -> None:
    """Simulate each set of rules, print, write."""
    options = _options()
    console = Console(stderr=options.json)
    recipe = load_recipe("default")
    load = Load(episodes=options.episodes, seconds=options.hours * 3600.0)
    machine = Machine(divergence=options.divergence)
    every = [BEFORE, *(rules_now(recipe, slots) for slots in options.slots)]
    started = perf_counter()
    days = [run_day(load, machine, rules, recipe, options.seed) for rules in every]
    seconds = perf_counter() - started
    found = [
        figures(day, load, rules.name, rules.slots) for day, rules in zip(days, every, strict=True)
    ]
    promises = bars(found)
    shown = [*tables(found), bars_table(promises)]
    for table in shown:
        console.print(table.rich())
    console.print(f"{seconds:.0f} s")
    if options.write:
        how = f"seed {options.seed}, {date.today().isoformat()}"
        PAGE.write_text(with_figures(PAGE.read_text(), shown, how, PICTURE))
        draw(PICTURE, found, days)
        console.print(f"written: {PAGE}, {PICTURE}")
    if options.json:
        print(json.dumps(msgspec.to_builtins(found)))
    sys.exit(0 if all(bar.holds for bar in promises) else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.durations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--episodes", type=int, default=100_000, help="of the day (100000)")
    parser.add_argument("--hours", type=float, default=DAY_S / 3600.0, help="of the day (24)")
    parser.add_argument("--slots", type=_numbers, default=[USUAL_SLOTS, 16], help="(8,16)")
    parser.add_argument(
        "--divergence", type=float, default=0.002, help="nats a token from version to version"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} and {PICTURE}")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


def _numbers(said: str) -> list[int]:
    return [int(part) for part in said.split(",")]


if __name__ == "__main__":
    main()
