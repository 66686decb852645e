"""Draw both tasks as curves in one picture: medians over seeds, and the band of all of them."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.air.figures import SUCCESS, Curve, Curves
from benchmarks.air.worlds import EASY, SPARSE, UNBOUNDED, WITH, WITHOUT

INK: Final = "#1f2933"
COLOURS: Final = {WITH.name: "#0b7285", WITHOUT.name: "#e8590c", UNBOUNDED.name: "#868e96"}


def draw(path: Path, found: Mapping[str, Curves]) -> None:
    """Draw held-out final reward over episodes, and the notes of the task that has them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.8), dpi=150)
    _curves(panels[0], found[SPARSE.name], "r_final")
    panels[0].axhline(SUCCESS, color=INK, linewidth=0.8, linestyle=":")
    panels[0].set_title("sparse reward: final reward", fontsize=10, color=INK)
    _curves(panels[1], found[EASY.name], "r_final")
    panels[1].set_title("with an easy tool: final reward", fontsize=10, color=INK)
    _curves(panels[2], found[EASY.name], "notes")
    panels[2].set_title("with an easy tool: easy calls an episode", fontsize=10, color=INK)
    for axes in panels[:2]:
        axes.set_ylim(0, 1)
    panels[1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _curves(axes: Any, curves: Curves, what: str) -> None:
    for arm, own in curves.items():
        episodes = [look.episodes for look in next(iter(own.values()))]
        columns = list(zip(*(_values(curve, what) for curve in own.values()), strict=True))
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(episodes, low, high, color=COLOURS[arm], alpha=0.15, linewidth=0)
        middle = [median(column) for column in columns]
        axes.plot(episodes, middle, color=COLOURS[arm], linewidth=2, label=arm)
    axes.set_xlabel("episodes", fontsize=9)
    axes.grid(axis="y", color="#adb5bd", alpha=0.4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _values(curve: Curve, what: str) -> list[float]:
    return [getattr(look, what) for look in curve]
