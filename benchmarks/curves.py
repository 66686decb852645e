"""Run `python -m benchmarks.curves`: what several seeds of a scenario learned, beside each other.

    python -m benchmarks.curves --to docs/images/curves-math.png \
        "GRPO=var/examples/math,var/examples/math-1" "SFT=var/examples/math-sft"

Reads the `summary.json` of runs of `make example`, a label with its seeds' folders each. Prints a
table in Markdown: held-out reward before and after, mean and range of the seeds. Draws the reward
at work by the leading policy's versions, and the held-out reward over the updates.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.proxy.tables import Rows

COLOURS: Final = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e")
INK: Final = "#1f2933"
FAINT: Final = "#adb5bd"
HEADS: Final = ("", "seeds", "before", "after", "rise", "updates", "minutes", "largest fall")
# A point of a curve: its place (updates or a version), and the mean reward there.
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Run:
    """Hold what one run learned.

    Attributes:
        seed: of tasks and adapter.
        held_out: mean held-out reward, over the finished updates of all policies.
        at_work: mean reward of the episodes of work, by the leading policy's version.
        minutes: of the whole run.
        largest_fall: how far the held-out reward ever was below the best one before it.
    """

    seed: int
    held_out: Curve
    at_work: Curve
    minutes: float
    largest_fall: float

    @property
    def before(self) -> float:
        """Return the held-out reward of the base model."""
        return self.held_out[0][1]

    @property
    def after(self) -> float:
        """Return the held-out reward of the last versions."""
        return self.held_out[-1][1]


def run_of(summary: dict[str, Any]) -> Run:
    """Return the run that a scenario's summary describes (its keys: docs/scenarios.md)."""
    leading = next(name for name, one in summary["policies"].items() if one["trained"])
    versions = summary["by_version"][leading]
    return Run(
        seed=summary["seed"],
        held_out=[(look["updates"], look["score"]) for look in summary["held_out"]],
        at_work=[(one["version"], one["reward"]) for one in versions if one["reward"] is not None],
        minutes=summary["seconds"] / 60,
        largest_fall=summary["largest_fall"],
    )


def value_at(curve: Curve, place: float) -> float:
    """Return a curve's value at a place within it, straight between its points."""
    before = max((point for point in curve if point[0] <= place), key=lambda point: point[0])
    after = min((point for point in curve if point[0] >= place), key=lambda point: point[0])
    if before[0] == after[0]:
        return before[1]
    share = (place - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])


def band(curves: Sequence[Curve]) -> list[tuple[float, float, float, float]]:
    """Return place, least, mean and greatest value where all curves have one."""
    first = max(curve[0][0] for curve in curves)
    last = min(curve[-1][0] for curve in curves)
    places = sorted({place for curve in curves for place, _ in curve if first <= place <= last})
    values = [(place, [value_at(curve, place) for curve in curves]) for place in places]
    return [(place, min(those), fmean(those), max(those)) for place, those in values]


def table(groups: dict[str, list[Run]]) -> Rows:
    """Return a line for each label: mean and range of its seeds."""
    return Rows("Scenarios", HEADS, [_line(label, runs) for label, runs in groups.items()])


def _line(label: str, runs: Sequence[Run]) -> list[str]:
    return [
        label,
        ", ".join(str(run.seed) for run in runs),
        _spread([run.before for run in runs]),
        _spread([run.after for run in runs]),
        _spread([run.after - run.before for run in runs]),
        ", ".join(f"{run.held_out[-1][0]:g}" for run in runs),
        ", ".join(f"{run.minutes:.1f}" for run in runs),
        f"{max(run.largest_fall for run in runs):.3f}",
    ]


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def draw(path: Path, groups: dict[str, list[Run]]) -> None:
    """Draw thin lines for seeds, and mean and range where a label has several."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=150, sharey=True)
    for colour, (label, runs) in zip(COLOURS, groups.items(), strict=False):
        _draw_group(left, [run.at_work for run in runs], colour, label)
        _draw_group(right, [run.held_out for run in runs], colour, label)
    _dress(left, "reward at work", "version")
    _dress(right, "held-out reward", "updates")
    if len(groups) > 1:
        right.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _draw_group(axes: Any, curves: Sequence[Curve], colour: str, label: str) -> None:
    if len(curves) == 1:
        axes.plot(*zip(*curves[0], strict=True), "o-", color=colour, markersize=4, label=label)
        return
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), ".-", color=colour, linewidth=0.8, alpha=0.5)
    places, least, mean, greatest = zip(*band(curves), strict=True)
    axes.fill_between(places, least, greatest, color=colour, alpha=0.12, linewidth=0)
    axes.plot(places, mean, color=colour, linewidth=2.5, label=f"{label}, mean of {len(curves)}")


def _dress(axes: Any, title: str, counted: str) -> None:
    axes.set_title(title, loc="left", color=INK)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(counted)
    axes.grid(axis="y", color=FAINT, alpha=0.4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _group(text: str) -> tuple[str, list[Path]]:
    label, mark, folders = text.partition("=")
    if not mark or not folders:
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=FOLDER,FOLDER: name its folders")
    return label, [Path(folder) for folder in folders.split(",")]


def _read(folder: Path) -> Run:
    path = folder / "summary.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist: run `make example` with `--var {folder}` first")
    return run_of(json.loads(path.read_text()))


def main() -> None:
    """Print the table, and draw the picture where it is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="+", type=_group, metavar="LABEL=FOLDER,FOLDER")
    parser.add_argument("--to", type=Path, help="draw the curves into this PNG file")
    options = parser.parse_args()
    groups = {label: [_read(folder) for folder in folders] for label, folders in options.groups}
    print(table(groups).markdown())
    if options.to is not None:
        draw(options.to, groups)


if __name__ == "__main__":
    main()
