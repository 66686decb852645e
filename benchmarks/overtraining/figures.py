"""Keep what a long course of learning came to, and hold it against the bar (pure)."""

from collections.abc import Sequence
from math import sqrt
from typing import Any, Final

import msgspec

from benchmarks.proxy.figures import Bar
from benchmarks.proxy.tables import Rows, number
from store.records import Record

# The bar: held-out success may be so much below the best that it ever was.
MOST_DROP: Final = 0.03
# The bar: the course has so many times the updates after which the demo ends.
TIMES: Final = 3
# What an update's metrics say about its step, by the head of its column.
STEP: Final = {
    "episodes": "trained_episodes",
    "of full size": "step_share",
    "reward": "reward_mean",
    "gradient": "grad_norm",
    "entropy": "entropy",
    "ratio cut": "ratio_cut_share",
    "moved since sampling": "staleness_kl",
}


class Exam(Record, frozen=True, kw_only=True):
    """State the share of `answers` to held-out questions that were right after so many updates."""

    updates: int
    success: float
    answers: int

    @property
    def error(self) -> float:
        """Return the standard error of `success`, as if all questions were equally hard.

        They are not, and so it is less: the questions are the same in each exam.
        """
        return sqrt(self.success * (1.0 - self.success) / self.answers)


class Wave(Record, frozen=True, kw_only=True):
    """State the share of right answers at work, which began after so many updates."""

    updates: int
    success: float


class Found(Record, frozen=True, kw_only=True):
    """Hold the figures of a course.

    The demo would have ended after `demo_updates` updates; None: it would not have ended yet.
    `steps` are the metrics of the updates that made a version; `without_version` others had no
    signal.
    """

    recipe: str
    seed: int
    exams: tuple[Exam, ...] = ()
    waves: tuple[Wave, ...] = ()
    steps: tuple[dict[str, Any], ...] = ()
    without_version: int = 0
    demo_updates: int | None = None

    @property
    def best(self) -> Exam:
        """Return the best exam; of equals the first."""
        return max(self.exams, key=lambda one: one.success)

    @property
    def times(self) -> float | None:
        """Return how many times the demo's updates there were."""
        return len(self.steps) / self.demo_updates if self.demo_updates else None


def has_learned(waves: Sequence[Wave], learned: float) -> bool:
    """Return whether the demo would end now: the last two waves came to `learned` at least."""
    last = waves[-2:]
    return len(last) == 2 and all(one.success >= learned for one in last)


def largest_drop(exams: Sequence[Exam]) -> float:
    """Return by how much an exam was below the best one before it, at most; 0 if none was."""
    best = drop = 0.0
    for one in exams:
        best = max(best, one.success)
        drop = max(drop, best - one.success)
    # Shares of the same number of answers, and not what floating point makes of their difference.
    return round(drop, 6)


def bars(found: Found) -> list[Bar]:
    """Return the promises."""
    return [
        Bar("largest drop of held-out success", largest_drop(found.exams), MOST_DROP),
        Bar("times the demo's updates", found.times or 0.0, TIMES, at_least=True),
    ]


def tables(found: Found) -> list[Rows]:
    """Return held-out success over the updates, what it comes to, and each update's step."""
    exams = [
        [str(one.updates), f"{one.success:.3f}", f"{one.error:.3f}", str(one.answers)]
        for one in found.exams
    ]
    best, last = found.best, found.exams[-1]
    summary = [
        ["best", f"{best.success:.3f}", f"after {best.updates} updates"],
        ["last", f"{last.success:.3f}", f"after {last.updates} updates"],
        ["largest drop", f"{largest_drop(found.exams):.3f}", "below the best before it"],
    ]
    end = "not reached" if found.demo_updates is None else f"after {found.demo_updates} updates"
    summary.append(["the demo's end", number(found.times, 1), f"{end}; all, in times of these"])
    steps = [
        [str(at), *(_short(step.get(key)) for key in STEP.values())]
        for at, step in enumerate(found.steps, 1)
    ]
    return [
        Rows("Held-out", ["updates", "success", "standard error at most", "answers"], exams),
        Rows("In short", ["", "", "which is"], summary),
        Rows("Updates", ["update", *STEP], steps),
    ]


def _short(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def to_json(found: Found) -> bytes:
    """Return the figures as JSON, in lines."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
