"""Run `python -m benchmarks.overtraining`: three times the demo's updates must not undo it.

Runs the demo's loop on a whole stack, without its early end, until there are three times as many
updates as when the demo would have ended. Every few updates the held-out questions are asked. Exit
status: 1 where held-out success was ever more than 0.03 below its best, or the course was cut
short.
"""

import argparse
import asyncio
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import date
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from benchmarks.client_process import ROOT
from benchmarks.overtraining.course import Course, Limits
from benchmarks.overtraining.figures import Found, bars, tables, to_json
from benchmarks.overtraining.picture import draw
from benchmarks.proxy.page import with_figures
from benchmarks.proxy.tables import bars_table
from benchmarks.small_stack import small_plan
from pawl.scenarios.places import find_scenario
from pawl.scenarios.run import DEMO
from pawl.stack.model import unpacked_model
from pawl.stack.stack import running_stack
from store.connection.engine import make_engine
from trainer.recipes.recipe import load_recipe

PAGE: Final = Path("docs/explanation/overtraining.md")
PICTURE: Final = Path("docs/images/overtraining.png")
VAR: Final = ROOT / "var" / "overtraining"
FIGURES: Final = VAR / "figures.json"


async def measure(
    recipe: str, seed: int, limits: Limits, tell: Callable[[Found, str], None]
) -> Found:
    """Run a course on a stack of its own."""
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    shutil.rmtree(VAR, ignore_errors=True)
    (VAR / "data").mkdir(parents=True)
    model = str(await asyncio.to_thread(unpacked_model, ROOT / "var" / "models"))
    scenario = find_scenario(DEMO)
    plan = small_plan(VAR / "data", model, scenario.model, recipe)
    async with running_stack(msgspec.structs.replace(plan, seed=seed)) as stack:
        engine = make_engine(stack.database_url)
        found = Found(recipe=recipe, seed=seed)
        try:
            course = Course(scenario, stack, engine, load_recipe(recipe), limits, found, tell)
            return await course.run()
        finally:
            await engine.dispose()


def main() -> int:
    """Run a course, print, write; what there is after each wave is in a file, too."""
    options = _options()
    console, started = Console(), time.monotonic()

    def tell(found: Found, said: str) -> None:
        console.print(f"{time.monotonic() - started:6.0f} s  {said}")
        FIGURES.write_bytes(to_json(found))

    if options.figures is not None:
        found = _read(options.figures)
    else:
        limits = Limits(
            every=options.every,
            samples=options.samples,
            waves=options.waves,
            minutes=options.minutes,
        )
        found = _found(measure(options.recipe, options.seed, limits, tell))
    promises = bars(found)
    shown = [*tables(found), bars_table(promises)]
    for table in shown:
        console.print(table.rich())
    if options.write:
        how = f"recipe `{found.recipe}`, seed {found.seed}, {date.today().isoformat()}"
        PAGE.write_text(with_figures(PAGE.read_text(), shown, how, PICTURE))
        draw(PICTURE, found)
        console.print(f"written: {PAGE}, {PICTURE}")
    return 0 if all(bar.holds for bar in promises) else 1


def _found(course: Coroutine[Any, Any, Found]) -> Found:
    """Return the figures of a course; of one that was stopped by SIGTERM, what there are."""
    try:
        return asyncio.run(course)
    except asyncio.CancelledError:
        return _read(FIGURES)


def _read(path: Path) -> Found:
    return msgspec.json.decode(path.read_bytes(), type=Found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overtraining", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--recipe", default="demo", help="name of a recipe, or its file (demo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=3, help="updates from exam to exam (3)")
    parser.add_argument("--samples", type=int, default=2, help="answers to each question (2)")
    parser.add_argument("--waves", type=int, default=120, help="at most (120)")
    parser.add_argument("--minutes", type=float, default=120.0, help="of learning at most (120)")
    parser.add_argument("--figures", type=Path, help="show these, and run nothing")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} and {PICTURE}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
