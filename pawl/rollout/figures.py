"""Count what a rollout does (pure)."""

import math
from collections import Counter
from typing import Any

from pawl.judging.answers import metrics_of
from pawl.rollout.journal import Ended
from store.records import REWARD
from store.values.intervals import student, wilson


class Figures:
    """Count the settled runs of a rollout, and all errors, also those of abandoned attempts."""

    def __init__(self, planned: int) -> None:
        """Begin with nothing done of `planned` runs."""
        self.planned = planned
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.metrics: dict[str, list[float]] = {}

    def add(self, ended: Ended) -> None:
        """Count an attempt that ended; one that failed has no metrics."""
        self.outcomes[ended.outcome] += 1
        if ended.error is not None:
            self.errors[ended.error] += 1
        if ended.outcome == "done":
            for metric, value in metrics_of(ended.statements).items():
                self.metrics.setdefault(metric, []).append(value)

    @property
    def runs(self) -> int:
        """Return how many runs are settled."""
        return self.outcomes.total() - self.outcomes["abandoned"]

    @property
    def reward(self) -> float | None:
        """Return the mean reward, or None if no run has one."""
        rewards = self.metrics.get(REWARD)
        return math.fsum(rewards) / len(rewards) if rewards else None

    def summary(self) -> dict[str, Any]:
        """Return the counts as JSON has them, and the mean reward with its 95 % interval."""
        low, high = self._interval()
        means = {name: math.fsum(some) / len(some) for name, some in self.metrics.items()}
        return {
            "planned": self.planned,
            "runs": self.runs,
            "failed": self.outcomes["failed"],
            "unjudged": self.outcomes["unjudged"],
            "abandoned": self.outcomes["abandoned"],
            "rewarded": len(self.metrics.get(REWARD, ())),
            "reward": _rounded(self.reward),
            "low": _rounded(low),
            "high": _rounded(high),
            "metrics": {name: _rounded(mean) for name, mean in means.items()},
            "errors": dict(self.errors.most_common()),
        }

    def _interval(self) -> tuple[float | None, float | None]:
        """Return the limits of the mean reward: Wilson's where all are 0 or 1, else Student's."""
        mean, rewards = self.reward, self.metrics.get(REWARD, [])
        if mean is None:
            return None, None
        if set(rewards) <= {0.0, 1.0}:
            return wilson(mean, len(rewards))
        squares = math.fsum((reward - mean) ** 2 for reward in rewards)
        spread = math.sqrt(squares / max(1, len(rewards) - 1))
        return student(mean, spread, len(rewards)) or (None, None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
