"""Count what a rollout does, as its figures grow, and make its summary of them (pure)."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pawl.rollout.journal import Outline
from store.records import REWARD
from store.values.intervals import student, wilson

WAVES: Final = 10


@dataclass
class Tally:
    """Count some settled runs: those of a wave, of a policy version, or all.

    Attributes:
        runs: how many there are.
        failed: those that failed, which have no reward.
        unjudged: those on which the judge failed.
        rewards: the rewards of the others, as far as they have one.
        versions: the policy versions that served meanwhile, the newest last.
    """

    runs: int = 0
    failed: int = 0
    unjudged: int = 0
    rewards: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    def add(self, run: Outline) -> None:
        """Count a run."""
        self.runs += 1
        self.failed += run.outcome == "failed"
        self.unjudged += run.outcome == "unjudged"
        reward = run.metrics.get(REWARD)
        if reward is not None:
            self.rewards.append(reward)
        if run.version is not None and run.version not in self.versions:
            self.versions.append(run.version)

    @property
    def success(self) -> float | None:
        """Return the share of runs that did not fail, or None if there are none."""
        return 1 - self.failed / self.runs if self.runs else None

    @property
    def reward(self) -> float | None:
        """Return the mean reward, or None if no run has one."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    def summary(self) -> dict[str, Any]:
        """Return the counts as JSON has them, with the mean reward and its 95 % interval."""
        low, high = _interval(self.rewards)
        return {
            "runs": self.runs,
            "failed": self.failed,
            "unjudged": self.unjudged,
            "rewarded": len(self.rewards),
            "success": _rounded(self.success),
            "reward": _rounded(self.reward),
            "low": _rounded(low),
            "high": _rounded(high),
        }


class Figures:
    """Hold all counts of a rollout.

    Attributes:
        planned: how many runs there are to be.
        all: the settled runs.
        waves: the same by tenths of the rollout, in the order in which they ended.
        policies: the same by the policy version that was asked for.
        errors: how often each kind of error was met, lost attempts included.
        abandoned: attempts that were done again as another episode.
        refused: runs whose feedback was refused.
    """

    def __init__(self, planned: int) -> None:
        """Begin with nothing done of `planned` runs."""
        self.planned = planned
        self.all = Tally()
        self.waves: list[Tally] = []
        self.policies: dict[str, Tally] = {}
        self.errors: Counter[str] = Counter()
        self.metrics: dict[str, tuple[float, int]] = {}
        self.abandoned = 0
        self.refused = 0
        self._a_wave = max(1, math.ceil(planned / WAVES))

    def add(self, policy: str, run: Outline) -> None:
        """Count an attempt that ended."""
        if run.error is not None:
            self.errors[run.error] += 1
        if run.outcome == "abandoned":
            self.abandoned += 1
            return
        if self.all.runs % self._a_wave == 0:
            self.waves.append(Tally())
        for tally in (self.all, self.waves[-1], self.policies.setdefault(policy, Tally())):
            tally.add(run)
        told = {} if run.outcome == "failed" else run.metrics
        for metric, value in told.items():
            total, count = self.metrics.get(metric, (0.0, 0))
            self.metrics[metric] = (total + value, count + 1)

    @property
    def left(self) -> int:
        """Return how many runs are not settled."""
        return self.planned - self.all.runs

    def summary(self, seconds: float) -> dict[str, Any]:
        """Return the rollout's summary; `seconds` is how long the runner worked on it."""
        waves = [wave.summary() | {"versions": wave.versions} for wave in self.waves]
        return {
            "planned": self.planned,
            "complete": self.left == 0,
            **self.all.summary(),
            "abandoned": self.abandoned,
            "refused": self.refused,
            "metrics": {
                name: _rounded(total / count) for name, (total, count) in self.metrics.items()
            },
            "errors": dict(self.errors.most_common()),
            "seconds": round(seconds, 1),
            "policies": {name: tally.summary() for name, tally in self.policies.items() if name},
            "waves": waves,
        }


def _interval(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the limits of the mean reward: Wilson's where all are 0 or 1, else Student's."""
    if not rewards:
        return None, None
    mean = math.fsum(rewards) / len(rewards)
    if _are_binary(rewards):
        return wilson(mean, len(rewards))
    spread = math.sqrt(
        math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    )
    return student(mean, spread, len(rewards)) or (None, None)


def _are_binary(rewards: Iterable[float]) -> bool:
    return all(reward in (0.0, 1.0) for reward in rewards)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
