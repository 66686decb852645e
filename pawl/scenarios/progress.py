"""The figures of a running scenario, their display as a table, and the rule when to end it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import Any

from msgspec import to_builtins
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pawl.scenarios.agent import RunResult
from store.read.stats import PolicyTotals
from store.records import Record, UpdateRow

# A judge's metric: 1 if the run's tool calls were well-formed, else 0.
WELL_FORMED = "well_formed"


@dataclass
class Wave:
    """One wave of tasks, which ends with the `expected` number of results.

    `version` served when the wave began; `score` is the name of the judge's metric, 0 to 1.
    `mean_reward`, set at the wave's end, is that of `version` and later ones, without the control.
    """

    number: int
    version: int
    expected: int
    score: str
    results: list[RunResult] = field(default_factory=list)
    mean_reward: float | None = None

    @property
    def success(self) -> float:
        """Return the mean score so far, 0 to 1; a failed run scores 0."""
        return fmean([one.metrics.get(self.score, 0.0) for one in self.results] or [0.0])

    @property
    def well_formed_share(self) -> float | None:
        """Return the share of runs with well-formed tool calls; None if the judge reports none."""
        known = [one.metrics[WELL_FORMED] for one in self.results if WELL_FORMED in one.metrics]
        return fmean(known) if known else None


class HeldOut(Record, frozen=True, kw_only=True):
    """The mean score of the held-out tasks, in all and by family, after some waves and updates."""

    waves: int
    updates: int
    score: float
    families: Mapping[str, float] = {}


@dataclass
class Progress:
    """The figures of a run; lists are oldest first.

    Attributes:
        policy: the leading policy: the first trained one.
        phase: the current phase, in words.
        seconds: how long the run has worked, without the start of the processes.
        minutes: its time limit.
        held_out: the results on the held-out tasks; the first is the base model's.
        updates: the trainer's finished updates.
        totals: the ledger's counts for each policy.
        serving: the leading policy's serving version; 0 is the base model.
    """

    title: str
    policy: str
    phase: str = "starting"
    seconds: float = 0.0
    minutes: float = 0.0
    held_out: list[HeldOut] = field(default_factory=list)
    waves: list[Wave] = field(default_factory=list)
    updates: Sequence[UpdateRow] = ()
    totals: Sequence[PolicyTotals] = ()
    serving: int = 0
    failed_runs: int = 0

    @property
    def base_model_score(self) -> float | None:
        """Return the base model's mean score on the held-out tasks, 0 to 1."""
        return self.held_out[0].score if self.held_out else None

    @property
    def latest_version_score(self) -> float | None:
        """Return the last score on the held-out tasks; None if that is the base model's."""
        return self.held_out[-1].score if len(self.held_out) > 1 else None

    @property
    def best(self) -> HeldOut | None:
        """Return the best held-out result of a version but the base model, or None."""
        return max(self.held_out[1:], key=lambda look: look.score, default=None)

    @property
    def done_updates(self) -> list[UpdateRow]:
        """Return the updates that made a version."""
        return [update for update in self.updates if update.version is not None]


def render(progress: Progress) -> Group:
    """Return the live display of a run."""
    head = Text.assemble(
        (f"{progress.title}  ", "bold"),
        (f"{progress.phase}  ", "cyan"),
        f"{progress.seconds / 60:.1f} of at most {progress.minutes:g} min",
    )
    return Group(head, _facts(progress), _wave_table(progress))


def _facts(progress: Progress) -> Table:
    latest = progress.done_updates[-1].metrics if progress.done_updates else {}
    staleness = latest.get("staleness_mean")
    grid = Table.grid(padding=(0, 2))
    cells = {
        "update": str(len(progress.done_updates)),
        "version serving": f"@{progress.serving}" if progress.serving else "base",
        "staleness": "–" if staleness is None else f"{staleness:.1f}",
        "calls recorded": str(sum(one.calls for one in progress.totals)),
        "episodes trained": str(sum(one.trained_episodes for one in progress.totals)),
        "held-out before": _format_share(progress.base_model_score),
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
            _format_share(wave.success),
            ProgressBar(total=1.0, completed=wave.success, width=24),
            _format_share(wave.well_formed_share),
            _update_reward(progress, wave),
        )
    return table


def _update_reward(progress: Progress, wave: Wave) -> str:
    """Return the mean reward of the update that trained this wave, or a dash."""
    index = wave.number - 1
    updates = [update for update in progress.updates if update.policy == progress.policy]
    if index >= len(updates):
        return "–"
    mean = updates[index].metrics.get("reward_mean")
    return "–" if mean is None else f"{mean:.2f}"


def _format_share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


class EndingRule(Record, frozen=True, kw_only=True):
    """The rule when to end a run: after `most_waves` waves, or after two learned waves in a row.

    A wave is learned if its `mean_reward` is at least `learned`. With `updates`, the run
    ends after this many updates instead, whatever was learned. The time limit always counts.
    """

    learned: float
    most_waves: int
    updates: int | None = None

    @property
    def waves(self) -> int:
        """Return the most waves to run: more than `updates`, as some may make no version."""
        return self.most_waves if self.updates is None else max(self.most_waves, 2 * self.updates)

    def is_reached(self, progress: Progress) -> bool:
        """Return whether the last wave, whose update is done, is to be the final one."""
        per_wave = progress.seconds / max(1, len(progress.waves))
        # Another wave of average length would exceed the time limit.
        is_late = progress.seconds + per_wave > progress.minutes * 60
        if len(progress.waves) >= self.waves or is_late:
            return True
        if self.updates is not None:
            return len(progress.done_updates) >= self.updates
        last = progress.waves[-2:]
        return len(last) == 2 and all((wave.mean_reward or 0.0) >= self.learned for wave in last)


def outcome(progress: Progress, seconds: float) -> dict[str, Any]:
    """Return a run's result: scores before and after, updates and time."""
    return {
        "before": progress.base_model_score,
        "after": progress.latest_version_score,
        "best": None if progress.best is None else progress.best.score,
        "largest_fall": largest_fall([one.score for one in progress.held_out]),
        "seconds": round(seconds, 1),
        "updates": len(progress.done_updates),
        "held_out": to_builtins(progress.held_out),
    }


def largest_fall(scores: Sequence[float]) -> float:
    """Return the largest distance of a score below the best earlier one; 0 if none is below."""
    bests = accumulate(scores, max)
    return round(
        max((best - score for best, score in zip(bests, scores, strict=True)), default=0), 4
    )
