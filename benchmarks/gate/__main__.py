"""Run `python -m benchmarks.gate`: how often does the gate err, and how long does it take?

Simulates canaries that are as good as what serves, worse by the margin, better and far worse, with
the product's own decisions, looked at after every episode; and versions that fall while they serve,
tried before or not.
docs/explanation/gate.md says what this shows. Exit status: 1 where a bar does not hold.
"""

import argparse
import sys
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.gate.falls import Falls, FallWorld, run_falls
from benchmarks.gate.figures import Found, bars, tables
from benchmarks.gate.picture import draw
from benchmarks.gate.runs import Ends, Tell, peeked, run_world
from benchmarks.gate.successions import Untried, UntriedWorld, run_untried
from benchmarks.gate.worlds import EVEN_ODDS, HIDING, WORLDS, World
from benchmarks.proxy.page import with_figures
from benchmarks.proxy.tables import bars_table
from pawl.steward.gate.records import GateOptions

PAGE: Final = Path("docs/explanation/gate.md")
PICTURE: Final = Path("docs/images/gate.png")
MARGIN: Final = GateOptions().margin
# Effects, and the episodes after which a run without a verdict is given up.
EFFECTS: Final = {0.05: 30_000, 0.1: 12_000, 0.2: 6_000, -0.1: 12_000, -0.3: 4_000}
FALLS: Final = (
    FallWorld(0.02, 0.0),
    FallWorld(0.02, 0.3),
    FallWorld(0.02, 0.5),
    FallWorld(0.05, 0.3),
    FallWorld(0.05, 0.5, tried=500),
    FallWorld(0.05, 0.0, tried=500, later=2_500),
    FallWorld(0.05, 0.5, tried=500, later=2_500),
)
# By how much what hides its wrong answers is worse, and the episodes of a run.
WORSE: Final = -0.1
HIDDEN: Final = 4_000
# Episodes that a version serves.
SERVED: Final = 20_000
UNTRIED: Final = (
    UntriedWorld(0.1, 0.0),
    UntriedWorld(0.1, 0.3),
    UntriedWorld(0.1, 0.5),
    UntriedWorld(0.05, 0.5),
    UntriedWorld(0.02, 0.5),
    UntriedWorld(0.1, 0.5, each=16),
)
# Episodes of a line of versions.
LINE: Final = 7_680
COLUMNS: Final = (
    TextColumn("{task.description:<44}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
)


def main() -> int:
    """Simulate, print, write."""
    options = _options()
    console, started = Console(), perf_counter()
    if options.figures is not None:
        found = msgspec.json.decode(options.figures.read_bytes(), type=Found)
    else:
        with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
            found = _simulate(options, progress)
    promises = bars(found)
    shown = [*tables(found), bars_table(promises)]
    for table in shown:
        console.print(table.rich())
    console.print(f"{perf_counter() - started:.0f} s")
    if options.save is not None:
        options.save.write_bytes(msgspec.json.encode(found))
    if options.write:
        PAGE.write_text(with_figures(PAGE.read_text(), shown, date.today().isoformat(), PICTURE))
        draw(PICTURE, MARGIN)
        console.print(f"written: {PAGE}, {PICTURE}")
    return 0 if all(bar.holds for bar in promises) else 1


def _simulate(options: argparse.Namespace, progress: Progress) -> Found:
    def ends(world: World, effect: float, runs: int, count: int) -> Ends:
        tell = _teller(progress, f"{world.name}, {effect:+.2f}", runs)
        return run_world(world, effect, runs, count, tell)

    runs, count = options.runs, options.episodes
    return Found(
        equal=[ends(world, 0.0, runs, count) for world in WORLDS],
        worse=[ends(world, -MARGIN, runs, count) for world in WORLDS],
        effects=[
            ends(EVEN_ODDS, effect, max(1, runs // 5), most) for effect, most in EFFECTS.items()
        ],
        hidden=[ends(world, WORSE, max(1, runs // 5), HIDDEN) for world in HIDING],
        falls=[_falls(progress, world, max(1, runs // 50)) for world in FALLS],
        untried=[_untried(progress, world, max(1, runs // 100)) for world in UNTRIED],
        peeked=peeked(EVEN_ODDS, runs, count, GateOptions()),
        episodes=count,
    )


def _falls(progress: Progress, world: FallWorld, runs: int) -> Falls:
    tell = _teller(progress, f"falls by {world.fall}, {world.base_share:.0%} base", runs)
    return run_falls(world, runs, SERVED, tell)


def _untried(progress: Progress, world: UntriedWorld, runs: int) -> Untried:
    name = f"untried: falls by {world.fall}, {world.base_share:.0%} base, {world.each} each"
    return run_untried(world, runs, LINE, _teller(progress, name, runs))


def _teller(progress: Progress, name: str, total: int) -> Tell:
    task = progress.add_task(name, total=total)
    return lambda count: progress.advance(task, count)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=1_000, help="of each world (1000)")
    parser.add_argument("--episodes", type=int, default=2_000, help="of each run (2000)")
    parser.add_argument("--save", type=Path, help="write the figures into this file, as JSON")
    parser.add_argument("--figures", type=Path, help="show those of this file, and run nothing")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE} and {PICTURE}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
