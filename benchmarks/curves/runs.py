"""Read what runs of a scenario learned, and compare their curves (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from benchmarks.proxy.tables import Rows

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
