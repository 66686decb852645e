"""Keep the figures of a running demo, and show them on a terminal as a table (rich)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from store.read.stats import Totals
from store.records import UpdateRow

WELL_FORMED = ("ok", "error")


@dataclass
class Wave:
    """Describe one wave of questions and its results.

    Attributes:
        number: the wave's number, from 1.
        version: the policy version that served when the wave began; 0 is the base model.
        expected: number of results that end the wave.
        results: the agent's results so far.
        right: number of right answers among them.
    """

    number: int
    version: int
    expected: int
    results: list[dict[str, Any]] = field(default_factory=list)
    right: int = 0

    @property
    def success(self) -> float:
        """Return the share of right answers so far, 0 to 1."""
        return self.right / len(self.results) if self.results else 0.0

    @property
    def well_formed(self) -> float:
        """Return the share of results with a well-formed tool call, 0 to 1."""
        good = sum(
            1 for result in self.results if (result.get("tool") or {}).get("status") in WELL_FORMED
        )
        return good / len(self.results) if self.results else 0.0


@dataclass
class Progress:
    """Keep the figures of a demo run.

    Attributes:
        phase: what the demo does now, in words.
        seconds: time since its start.
        minutes: its time limit.
        before: success on the held-out questions with the base model, 0 to 1.
        after: the same with the last version.
        waves: the waves so far, oldest first.
        updates: the trainer's finished updates, oldest first.
        totals: the ledger's counts.
        serving: the version that serves; 0 is the base model.
        failed_calls: the agent's calls that failed.
    """

    phase: str = "starting"
    seconds: float = 0.0
    minutes: float = 0.0
    before: float | None = None
    after: float | None = None
    waves: list[Wave] = field(default_factory=list)
    updates: Sequence[UpdateRow] = ()
    totals: Totals | None = None
    serving: int = 0
    failed_calls: int = 0

    @property
    def done_updates(self) -> list[UpdateRow]:
        """Return the updates that made a version."""
        return [update for update in self.updates if update.version is not None]


def render(progress: Progress) -> Group:
    """Return the live display of a run: heading, figures, and a table of waves."""
    head = Text.assemble(
        ("Pawl demo  ", "bold"),
        (f"{progress.phase}  ", "cyan"),
        f"{progress.seconds / 60:.1f} of at most {progress.minutes:g} min",
    )
    return Group(head, _facts(progress), _wave_table(progress))


def _facts(progress: Progress) -> Table:
    latest = progress.done_updates[-1].metrics if progress.done_updates else {}
    staleness = latest.get("staleness_mean")
    totals = progress.totals
    grid = Table.grid(padding=(0, 2))
    cells = {
        "update": str(len(progress.done_updates)),
        "version serving": f"@{progress.serving}" if progress.serving else "base",
        "staleness": "–" if staleness is None else f"{staleness:.1f}",
        "calls recorded": str(totals.calls if totals else 0),
        "episodes trained": str(totals.trained_episodes if totals else 0),
        "held-out before": _share(progress.before),
    }
    grid.add_row(*[Text(name, style="dim") for name in cells])
    grid.add_row(*[Text(value, style="bold") for value in cells.values()])
    return grid


def _wave_table(progress: Progress) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("wave", "version", "asked", "right", "", "well-formed calls", "reward"):
        table.add_column(name, justify="left" if not name else "right")
    for wave in progress.waves[-14:]:
        table.add_row(
            str(wave.number),
            f"@{wave.version}" if wave.version else "base",
            f"{len(wave.results)}/{wave.expected}",
            _share(wave.success),
            ProgressBar(total=1.0, completed=wave.success, width=24),
            _share(wave.well_formed),
            _reward(progress, wave),
        )
    return table


def _reward(progress: Progress, wave: Wave) -> str:
    """Return the mean reward of the update that this wave was trained in, once it is known."""
    index = wave.number - 1
    if index >= len(progress.updates):
        return "–"
    mean = progress.updates[index].metrics.get("reward_mean")
    return "–" if mean is None else f"{mean:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
