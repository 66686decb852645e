"""Draw the days: what share was trained by duration, and the live versions over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.durations.day import Day
from benchmarks.durations.figures import Found

INK: Final = "#1f2933"
COLOURS: Final = ("#e8590c", "#0b7285", "#5f3dc4")
HOUR_S: Final = 3600.0


def draw(path: Path, found: Sequence[Found], days: Sequence[Day]) -> None:
    """Draw each day in its colour; a dotted line is the server's adapter slots."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (shares, live) = plt.subplots(1, 2, figsize=(11, 3.8), dpi=150)
    for one, day, colour in zip(found, days, COLOURS, strict=False):
        names = [bucket.name.removesuffix(" min").replace(" to ", "-") for bucket in one.buckets]
        trained = [bucket.trained for bucket in one.buckets]
        shares.plot(names, trained, color=colour, linewidth=2, marker="o", label=one.rules)
        hours = [at / HOUR_S for at, _ in day.live]
        live.plot(hours, [count for _, count in day.live], color=colour, linewidth=1)
        if one.slots is not None:
            live.axhline(one.slots, color=colour, linewidth=0.8, linestyle=":")
    shares.set_ylim(0, 1)
    shares.set_title("trained share", fontsize=10, color=INK)
    shares.set_xlabel("minutes that an episode takes", fontsize=9)
    shares.legend(frameon=False, fontsize=9)
    live.set_title("live versions", fontsize=10, color=INK)
    live.set_xlabel("hours", fontsize=9)
    for axes in (shares, live):
        axes.grid(axis="y", color="#adb5bd", alpha=0.4)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
