"""Draw the figures as one picture: calls a second, latency, chunk delay."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.proxy.figures import MANY, STREAMS, Peer

INK: Final = "#1f2933"
OURS: Final = "#0b7285"
OTHERS: Final = "#adb5bd"


def draw(path: Path, peers: Mapping[str, Peer]) -> None:
    """Draw three panels of bars on logarithmic scales, Pawl's own in its colour."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.4), dpi=150)
    present = [peer for peer in peers.values() if MANY in peer.calls]
    names = [peer.name for peer in present]
    calls = [peer.calls[MANY] for peer in present]
    _bars(panels[0], names, [found.calls_per_s for found in calls], f"calls/s, {MANY} at once")
    _bars(panels[1], names, [found.p99_ms for found in calls], f"ms, p99, {MANY} at once")
    streaming = [peer for peer in present if STREAMS[-1] in peer.streams]
    _bars(
        panels[2],
        [peer.name for peer in streaming],
        [peer.streams[STREAMS[-1]].delay_p99_ms for peer in streaming],
        f"ms, chunk p99, {STREAMS[-1]:,} streams",
    )
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    colours = [OURS if name == "pawl" else OTHERS for name in names]
    drawn = axes.barh(names, values, color=colours)
    axes.bar_label(drawn, [f"{value:,.3g}" if value < 100 else f"{value:,.0f}" for value in values])
    axes.set_xscale("log")
    axes.margins(x=0.3)
    axes.invert_yaxis()
    axes.set_title(f"{title} (log scale)", fontsize=10, color=INK)
    axes.set_xticks([])
    axes.minorticks_off()
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
