"""Measure on a toy task how much AIR helps, and whether it rewards easy tool calls too much.

A tiny policy (two layers, trained on a careless worker's episodes for half a minute) learns to use
three tools, with the product's credit and learner. On `sparse` only the right result is rewarded,
and it is rare; on `easy` a tool that always works competes with the task; on `both` success is as
rare as on `sparse`, beside the tool of `easy`. docs/explanation/credit.md discusses the results.
Ends with status 1 if a bar does not hold.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from rich.console import Console

from benchmarks.air.policy import Arm, Look, run_arm, use_one_thread, write_base
from benchmarks.air.task import BOTH, EASY, SPARSE, World
from benchmarks.report import NONE, Bar, Rows, bars_table, number, plotting
from benchmarks.stack import ROOT

PICTURE: Final = ROOT / "docs" / "images" / "air.png"
# Only the first seeds are judged by the bars; the others check that these were not lucky.
SEEDS: Final = (1, 2, 3, 4, 5)
OTHER_SEEDS: Final = (6, 7, 8, 9, 10)
BASE_STEPS, QUICK_BASE_STEPS, QUICK_WAVES = 1000, 100, 6
# The bars: the held-out success to reach, and the most episodes that this may take with AIR, as a
# share of those without AIR: without an easy tool, and with one.
SUCCESS, EPISODES_RATIO, BOTH_RATIO = 0.6, 0.5, 1.1
# Two means of five seeds differ by this much through sampling alone.
NOISE: Final = 0.02
# The end of a curve is the mean of this many last looks.
LAST_LOOKS: Final = 5


WITH, WITHOUT = Arm("AIR", 0.2, "#0b7285"), Arm("no AIR", 0.0, "#e8590c")
UNBOUNDED: Final = Arm("sum of scores", 0.2, "#868e96", unbounded=True)
ARMS: Final = {
    SPARSE.name: (WITH, WITHOUT),
    BOTH.name: (WITH, WITHOUT),
    EASY.name: (WITH, WITHOUT, UNBOUNDED),
}


# The curves of one world: arm → seed → curve.
Curves = Mapping[Arm, Mapping[int, Sequence[Look]]]


def main() -> None:
    options = parse_arguments()
    console = Console()
    worlds, steps = [SPARSE, BOTH, EASY], BASE_STEPS
    seeds, others = options.seeds, options.other_seeds
    if options.quick:
        worlds = [replace(world, waves=QUICK_WAVES) for world in worlds]
        seeds, others, steps = seeds[:1], [], QUICK_BASE_STEPS
    with tempfile.TemporaryDirectory(prefix="pawl-air-") as folder:
        curves = run_worlds(worlds, [*seeds, *others], steps, Path(folder), console)
    judged, checked = (
        {
            world: {arm: {seed: by_seed[seed] for seed in own} for arm, by_seed in arms.items()}
            for world, arms in curves.items()
        }
        for own in (seeds, others)
    )
    promises = bars(judged)
    tables = [
        reach_table("Sparse reward", judged[SPARSE.name]),
        reach_table("Sparse reward beside an easy tool", judged[BOTH.name]),
        easy_table("An easy tool beside the task", judged[EASY.name]),
    ]
    if others:
        tables.append(reach_table("Sparse reward, other seeds", checked[SPARSE.name]))
        tables.append(reach_table("Both, other seeds", checked[BOTH.name]))
        tables.append(easy_table("An easy tool, other seeds", checked[EASY.name]))
    for table in [*tables, bars_table(promises)]:
        console.print(table.rich())
    if options.write:
        draw(judged)
    sys.exit(0 if options.quick or all(bar.holds for bar in promises) else 1)


def parse_arguments() -> argparse.Namespace:
    def to_numbers(given: str) -> list[int]:
        return [int(number) for number in given.split(",") if number]

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.air", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=to_numbers, default=list(SEEDS), help="judged (1,2,3,4,5)")
    parser.add_argument(
        "--other-seeds", type=to_numbers, default=list(OTHER_SEEDS), help="a check (6,7,8,9,10)"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, short: does it run")
    parser.add_argument("--write", action="store_true", help=f"write {PICTURE.name}")
    return parser.parse_args()


def run_worlds(
    worlds: Sequence[World], seeds: Sequence[int], steps: int, folder: Path, console: Console
) -> dict[str, Curves]:
    """Run all arms with all seeds, in processes of one thread each; return the curves by world."""
    context = multiprocessing.get_context("spawn")
    curves: dict[str, dict[Arm, dict[int, Sequence[Look]]]] = {
        world.name: {arm: {} for arm in ARMS[world.name]} for world in worlds
    }
    with ProcessPoolExecutor(mp_context=context, initializer=use_one_thread) as pool:
        writing = [pool.submit(write_base, folder / one.name, one, steps) for one in worlds]
        running = {
            pool.submit(run_arm, world, base.result(), arm, seed): (world.name, arm, seed)
            for world, base in zip(worlds, writing, strict=True)
            for seed in seeds
            for arm in ARMS[world.name]
        }
        for future in as_completed(running):
            name, arm, seed = running[future]
            curve = curves[name][arm][seed] = future.result()
            ends = f"{curve[0].r_final:.3f} → {curve[-1].r_final:.3f}"
            console.print(f"{name}, {arm.name}, seed {seed}: {ends}")
    return dict(curves)


def episodes_until_success(curve: Sequence[Look]) -> int | None:
    """Return the number of episodes until a look first reaches `SUCCESS`; None if none does."""
    return next((look.episodes for look in curve if look.r_final >= SUCCESS), None)


def air_ratios(curves: Curves) -> dict[int, float | None]:
    """Return by seed the episodes until success with AIR, divided by those without AIR.

    The value is None if success was not reached with AIR, and an upper bound if not without it.
    """
    by_seed: dict[int, float | None] = {}
    for seed, curve in curves[WITH].items():
        ours, theirs = episodes_until_success(curve), episodes_until_success(curves[WITHOUT][seed])
        by_seed[seed] = None if ours is None else ours / (theirs or curve[-1].episodes)
    return by_seed


def median_ratio(curves: Curves) -> float | None:
    """Return the median of `air_ratios`; None if most seeds had no success with AIR."""
    values = [float("inf") if ratio is None else ratio for ratio in air_ratios(curves).values()]
    middle = median(values)
    return middle if middle < float("inf") else None


def means_at_end(curves: Mapping[int, Sequence[Look]], figure: str = "r_final") -> list[float]:
    """Return the end of each seed's curve: the mean of its last looks."""
    return [fmean(getattr(look, figure) for look in one[-LAST_LOOKS:]) for one in curves.values()]


def bars(worlds: Mapping[str, Curves]) -> list[Bar]:
    easy = worlds[EASY.name]
    start, end = (
        fmean(curve[0].r_final for curve in easy[WITH].values()),
        fmean(means_at_end(easy[WITH])),
    )
    ratio = median_ratio(worlds[SPARSE.name])
    return [
        Bar("episodes_with_per_without", ratio, EPISODES_RATIO),
        Bar("both_with_per_without", median_ratio(worlds[BOTH.name]), BOTH_RATIO),
        Bar("easy_fall_from_start", start - end, 0.0),
        Bar("easy_fall_from_without", fmean(means_at_end(easy[WITHOUT])) - end, NOISE),
    ]


def reach_table(title: str, curves: Curves) -> Rows:
    """Return a table of episodes until success, a line for each seed and one for the median."""
    heads = ["seed", "success at the start", "episodes with AIR", "without", "ratio"]
    lines = []
    for seed, ratio in air_ratios(curves).items():
        both = curves[WITH][seed], curves[WITHOUT][seed]
        counts = [episodes_until_success(one) for one in both]
        shown = [
            f"> {one[-1].episodes:,}" if count is None else number(count)
            for count, one in zip(counts, both, strict=True)
        ]
        bound = "≤ " if ratio is not None and counts[1] is None else ""
        start = number(both[0][0].r_final, 3)
        lines.append([str(seed), start, *shown, bound + number(ratio, 2)])
    lines.append(["median", NONE, NONE, NONE, number(median_ratio(curves), 2)])
    return Rows(title, heads, lines)


def easy_table(title: str, curves: Curves) -> Rows:
    """Return a table of the task with easy calls: each arm's figures at the start and the end."""
    heads = ["", "r_final at the start", "at the end", "least of a seed"]
    heads += ["calls an episode", "of them notes"]
    lines = [
        [
            arm.name,
            number(fmean(curve[0].r_final for curve in own.values()), 2),
            *(number(of(means_at_end(own)), 2) for of in (fmean, min)),
            *(number(fmean(means_at_end(own, figure)), 1) for figure in ("calls", "notes")),
        ]
        for arm, own in curves.items()
    ]
    return Rows(
        title, heads, lines, [f"{UNBOUNDED.name}: a counter-example, not a recipe of Pawl."]
    )


def draw(worlds: Mapping[str, Curves]) -> None:
    """Draw the curves of two tasks: the medians over seeds, and the band of all seeds."""
    figure, panels = plotting().subplots(1, 3, figsize=(13, 3.8), dpi=150)
    sparse, easy = worlds[SPARSE.name], worlds[EASY.name]
    _curves(panels[0], sparse, "r_final", "sparse reward: final reward")
    _curves(panels[1], easy, "r_final", "with an easy tool: final reward")
    _curves(panels[2], easy, "notes", "with an easy tool: easy calls an episode")
    panels[0].axhline(SUCCESS, color="#1f2933", linewidth=0.8, linestyle=":")
    for axes in panels[:2]:
        axes.set_ylim(0, 1)
    panels[1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(PICTURE)


def _curves(axes: Any, curves: Curves, figure: str, title: str) -> None:
    for arm, own in curves.items():
        episodes = [look.episodes for look in next(iter(own.values()))]
        seeds = [[getattr(look, figure) for look in curve] for curve in own.values()]
        low, middle, high = (
            [of(column) for column in zip(*seeds, strict=True)] for of in (min, median, max)
        )
        axes.fill_between(episodes, low, high, color=arm.colour, alpha=0.15, linewidth=0)
        axes.plot(episodes, middle, color=arm.colour, linewidth=2, label=arm.name)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("episodes", fontsize=9)
    axes.grid(axis="y", color="#adb5bd", alpha=0.4)


if __name__ == "__main__":
    main()
