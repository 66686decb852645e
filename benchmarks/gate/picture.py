"""Draw how the bounds of the difference close in, for three canaries."""

from pathlib import Path
from typing import Final

from benchmarks.gate.runs import options_for, seeded
from benchmarks.gate.worlds import EVEN_ODDS, draw_runs
from pawl.steward.gate.trial import Trial

COLOURS: Final = {0.1: "#0b7285", 0.0: "#868e96", -0.1: "#e8590c"}
INK: Final = "#1f2933"
EPISODES: Final = 6_000
EVERY: Final = 100


def draw(path: Path, margin: float) -> None:
    """Draw the bounds over the episodes, up to the verdict."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.8), dpi=150)
    for effect, colour in COLOURS.items():
        seen, lower, upper = _bounds(effect)
        label = f"{effect:+.1f}" if effect else "as good"
        axes.fill_between(seen, lower, upper, color=colour, alpha=0.25, linewidth=0, label=label)
        axes.plot(seen, lower, color=colour, linewidth=1.2)
        axes.plot(seen, upper, color=colour, linewidth=1.2)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.axhline(-margin, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(-0.6, 0.6)
    axes.set_xlabel("episodes of all arms, up to the verdict")
    axes.set_ylabel("bounds of canary − serving", fontsize=9)
    axes.legend(frameon=False, loc="upper right", title="the canary is")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _bounds(effect: float) -> tuple[list[int], list[float], list[float]]:
    trial = Trial(options_for(EVEN_ODDS))
    points: list[tuple[int, float, float]] = []
    drawn = draw_runs(EVEN_ODDS, effect, 1, EPISODES, seeded("picture", effect))
    for seen, episode in enumerate(drawn.episodes(0), start=1):
        trial.extend([episode])
        if seen % EVERY == 0 or trial.is_decided:
            decision = trial.decide(0.0)
            points.append((seen, decision.lower, decision.upper))
        if trial.is_decided:
            break
    seen_at, lower, upper = zip(*points, strict=True)
    return list(seen_at), list(lower), list(upper)
