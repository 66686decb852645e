"""Write the report of a run: `summary.json`, and `reward.png` (matplotlib)."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pawl.scenarios.ledger import VersionRewards
from pawl.scenarios.progress import HeldOut, Progress
from pawl.scenarios.scenario import ScenarioFailed

# Colours.
INK: Final = "#1f2933"
SCORE: Final = "#0b7285"
WELL_FORMED: Final = "#e8590c"
FAINT: Final = "#adb5bd"
# Labels.
WELL_FORMED_LABEL: Final = "well-formed tool calls"
AT_WORK: Final = {"success": "right answers at work", "reward": "reward at work"}
HELD_OUT: Final = "held-out tasks"
# Sizes of the picture, in inches.
WIDTH: Final = 8.0
WAVES_HEIGHT: Final = 4.2
VERSIONS_HEIGHT: Final = 2.6
Curves = Mapping[str, Sequence[VersionRewards]]


def check_drawing() -> None:
    """Check, before half an hour of work, that the picture at its end can be drawn.

    Raises:
        ScenarioFailed: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ScenarioFailed(
            "matplotlib, which draws the picture at the end, is not installed: run `make install`, "
            "or install the extra `demo` of Pawl"
        )


def draw(path: Path, progress: Progress, score: str, curves: Curves) -> None:
    """Draw score and well-formed calls of each wave, and the held-out scores between waves.

    If several policies are trained, a plot for each below has the rewards of its versions, at work
    and on held-out tasks.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    below = curves if len(curves) > 1 else {}
    heights = [WAVES_HEIGHT, *([VERSIONS_HEIGHT] if below else [])]
    figure = plt.figure(figsize=(WIDTH, sum(heights)), dpi=150)
    grid = figure.add_gridspec(len(heights), len(below) or 1, height_ratios=heights)
    _draw_waves(figure.add_subplot(grid[0, :]), progress, score)
    for column, (policy, curve) in enumerate(below.items()):
        _draw_versions(figure.add_subplot(grid[1, column]), policy, curve)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _draw_waves(axes: Any, progress: Progress, score: str) -> None:
    numbers = [wave.number for wave in progress.waves]
    formed = [wave.well_formed_share for wave in progress.waves]
    right = [wave.success for wave in progress.waves]
    if None not in formed:
        axes.plot(numbers, formed, "o-", color=WELL_FORMED, markersize=4, label=WELL_FORMED_LABEL)
    axes.plot(numbers, right, "o-", color=SCORE, linewidth=2.5, label=AT_WORK[score])
    looks = progress.held_out
    waves, scores = [one.waves for one in looks], [one.score for one in looks]
    axes.plot(waves, scores, "D--", color=INK, markersize=6, label=HELD_OUT)
    for one in labelled_looks(progress):
        _label(axes, one.waves, one.score)
    format_axes(axes, "wave")
    title = "An unchanged agent gets better while it works"
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.legend(frameon=False, loc="lower center")


def labelled_looks(progress: Progress) -> list[HeldOut]:
    """Return the held-out results to label: the base model's, the best later one, and the last."""
    looks = progress.held_out
    ends = [*looks[:1], *looks[1:][-1:]]
    return ends if progress.best is None or progress.best in ends else [*ends, progress.best]


def _draw_versions(axes: Any, policy: str, curve: Sequence[VersionRewards]) -> None:
    worked = [one for one in curve if one.reward is not None]
    asked = [one for one in curve if one.held_out is not None]
    versions = [one.version for one in worked]
    axes.plot(versions, [one.reward for one in worked], "o-", color=SCORE, label=AT_WORK["reward"])
    versions = [one.version for one in asked]
    axes.plot(versions, [one.held_out for one in asked], "D--", color=INK, label=HELD_OUT)
    format_axes(axes, "version")
    axes.set_xlim(-0.5, max([1, *(one.version for one in curve)]) + 0.5)
    axes.set_title(policy, loc="left", color=INK)


def _label(axes: Any, wave: int, score: float) -> None:
    axes.annotate(
        f"{score:.0%}",
        (wave, score),
        xytext=(0, 9),
        textcoords="offset points",
        ha="center",
        weight="bold",
    )


def format_axes(axes: Any, x_label: str) -> None:
    """Format the axes for shares (0 to 1) against whole numbers."""
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(x_label)
    axes.grid(axis="y", color=FAINT, alpha=0.4)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def write_report(
    score: str, folder: Path, summary: dict[str, Any], progress: Progress, curves: Curves
) -> None:
    """Write the summary and the picture of a `score` to `folder`, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(folder / "reward.png", progress, score, curves)


def closing_words(
    score: str, summary: dict[str, Any], folder: Path, data: Path, policy: str
) -> str:
    """Return a run's closing message in rich's markup: the result, its files, and next steps.

    `data` is the data folder of the run's own database; `policy` is a trained one.
    """
    return (
        f"\nHeld-out {score} went from [bold]{summary['before']:.0%}[/] to "
        f"[bold]{summary['after']:.0%}[/]{_describe_best(summary)} in {summary['updates']} updates "
        f"({summary['seconds'] / 60:.1f} min); {summary['recorded']} of "
        f"{summary['calls']} calls recorded, {summary['failed_requests']} failed.\n"
        f"{_describe_families(summary)}"
        f"Picture and figures: {folder / 'reward.png'}, {folder / 'summary.json'}\n"
        "What next: see the rewards of each version's evaluation, and read what was recorded\n"
        f"    PAWL_DATA_DIR={data} .venv/bin/pawl policies show {policy}\n"
        f"    PAWL_DATA_DIR={data} .venv/bin/pawl export --out episodes.jsonl\n"
        "and let your own agent learn: start [bold].venv/bin/pawl up[/], set\n"
        "    OPENAI_BASE_URL=http://127.0.0.1:8100/v1\n"
        "and POST rewards to http://127.0.0.1:8100/feedback (README: Use it with your agent)."
    )


def _describe_families(summary: dict[str, Any]) -> str:
    """Return in words the first and last score of each family of tasks, if there are several."""
    first, last = summary["held_out"][0]["families"], summary["held_out"][-1]["families"]
    both = [name for name in first if name in last]
    changes = ", ".join(f"{name} {first[name]:.0%} to {last[name]:.0%}" for name in both)
    return f"By family of tasks: {changes}.\n" if len(both) > 1 else ""


def _describe_best(summary: dict[str, Any]) -> str:
    """Return in words the best held-out score after the base model's, unless it is the last."""
    is_last = summary["best"] in (None, summary["after"])
    return "" if is_last else f" (best {summary['best']:.0%})"
