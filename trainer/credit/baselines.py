"""Baselines: what a return is compared with, and how far comparable returns spread (pure).

- `group`: the mean of the group's scored episodes (GRPO, arXiv:2402.03300 §4.1.2).
- `leave_one_out`: the mean of the group's other scored episodes (RLOO, arXiv:2402.14740 §2).
- `moving`: the moving average of what earlier episodes of the task's family earned the agent.
- `none`: 0.

Each episode counts once, whatever its number of calls. An episode's value is the mean of its
calls' returns, and its part in the variance is their mean squared difference from the
baseline's mean. Where all its calls have the same return, as they have by default, both are
the usual mean and sample variance of the episodes' returns.

Functions take one sequence of call returns for each compared episode (or for each agent of an
episode, under `per_agent`) and give one `Baseline` for each, in the same order.
"""

from collections.abc import Sequence
from math import fsum, sqrt
from typing import Literal

from store.records import Record
from trainer.credit.means import mean_of, mean_square
from trainer.credit.moving import MovingBaselines

NoSignal = Literal["alone", "no_spread"]


class Baseline(Record, frozen=True, kw_only=True):
    """The value that an episode's returns are compared with, and the spread of such returns.

    `spread` is None if there are no comparable returns. `reason` says why the comparison
    gives no signal: the episode is `alone`, or all returns are equal (`no_spread`).
    """

    value: float
    spread: float | None
    reason: NoSignal | None = None


def group_baselines(returns: Sequence[Sequence[float]]) -> list[Baseline]:
    """Return the group's mean for each of its episodes."""
    mean = mean_of([mean_of(values) for values in returns])
    spread = spread_about(mean, returns)
    reason = _no_signal_reason(mean, returns)
    return [Baseline(value=mean, spread=spread, reason=reason)] * len(returns)


def leave_one_out_baselines(returns: Sequence[Sequence[float]]) -> list[Baseline]:
    """Return for each episode of a group the mean of the others.

    The spread is the whole group's. An episode that is alone has the value 0.
    """
    means = [mean_of(values) for values in returns]
    mean = mean_of(means)
    spread, reason = spread_about(mean, returns), _no_signal_reason(mean, returns)
    return [
        Baseline(
            value=mean_of(means[:place] + means[place + 1 :]) if len(returns) > 1 else 0.0,
            spread=spread,
            reason=reason,
        )
        for place in range(len(returns))
    ]


def moving_baselines(
    returns: Sequence[Sequence[float]],
    family: str,
    agent: str,
    before: MovingBaselines,
    after: MovingBaselines,
) -> list[Baseline]:
    """Return for each episode the moving average of its family and agent before the update.

    The first update of a family is compared with its own mean. The spread is the one after
    the update: after a hundred equal failures the spread before it is 0, and the first
    success would be divided by nothing.
    """
    known = before.mean(family, agent)
    mean = after.mean(family, agent) if known is None else known
    spread = after.spread(family, agent)
    assert mean is not None
    reason: NoSignal | None = "no_spread" if _all_equal(mean, returns) else None
    if known is None and len(returns) < 2:
        reason = "alone"
    return [Baseline(value=mean, spread=spread, reason=reason)] * len(returns)


def zero_baselines(returns: Sequence[Sequence[float]]) -> list[Baseline]:
    """Return a baseline of 0 for each episode: its advantage is its return."""
    return [Baseline(value=0.0, spread=None)] * len(returns)


def spread_about(mean: float, returns: Sequence[Sequence[float]]) -> float:
    """Return the sample standard deviation over episodes (divisor n − 1), 0 for a single one.

    An episode's part is the mean squared difference of its calls' returns from `mean`.
    """
    if len(returns) < 2:
        return 0.0
    squares = [mean_square([value - mean for value in values]) for values in returns]
    return sqrt(fsum(squares) / (len(returns) - 1))


def _no_signal_reason(mean: float, returns: Sequence[Sequence[float]]) -> NoSignal | None:
    if len(returns) < 2:
        return "alone"
    return "no_spread" if _all_equal(mean, returns) else None


def _all_equal(mean: float, returns: Sequence[Sequence[float]]) -> bool:
    return all(value == mean for values in returns for value in values)
