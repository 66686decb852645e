"""Draw the curves of several seeds and learners beside each other (matplotlib)."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from benchmarks.curves.runs import Curve, Run, band
from pawl.scenarios.picture import INK, dress

COLOURS: Final = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e")


def draw(path: Path, groups: dict[str, list[Run]]) -> None:
    """Draw thin lines for seeds, and mean and range where a label has several."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=150, sharey=True)
    for colour, (label, runs) in zip(cycle(COLOURS), groups.items(), strict=False):
        _draw_group(left, [run.at_work for run in runs], colour, label)
        _draw_group(right, [run.held_out for run in runs], colour, label)
    for axes, title, counted in (
        (left, "reward at work", "version"),
        (right, "held-out reward", "updates"),
    ):
        dress(axes, counted)
        axes.set_title(title, loc="left", color=INK)
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
