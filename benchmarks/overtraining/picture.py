"""Draw held-out success over the updates, beside the success at work."""

from pathlib import Path
from typing import Final

from benchmarks.overtraining.figures import MOST_DROP, Found

INK: Final = "#1f2933"
RISING: Final = "#0b7285"
FAINT: Final = "#adb5bd"


def draw(path: Path, found: Found) -> None:
    """Draw the exams with their standard errors; below the dotted line the bar does not hold."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.8), dpi=150)
    waves = [(one.updates, one.success) for one in found.waves]
    axes.plot(*zip(*waves, strict=True), ".-", color=FAINT, label="at work, wave by wave")
    updates = [one.updates for one in found.exams]
    success = [one.success for one in found.exams]
    errors = [one.error for one in found.exams]
    style = {"color": RISING, "linewidth": 2.5, "capsize": 3}
    axes.errorbar(updates, success, errors, fmt="o-", label="held-out", **style)
    axes.axhline(found.best.success - MOST_DROP, color=INK, linewidth=0.8, linestyle=":")
    if found.demo_updates is not None:
        axes.axvline(found.demo_updates, color=INK, linewidth=0.8, linestyle="--")
        axes.annotate("the demo ends", (found.demo_updates, 0.03), fontsize=9, color=INK)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("updates")
    axes.grid(axis="y", color=FAINT, alpha=0.4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
