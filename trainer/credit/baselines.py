"""What a return is compared with, and how far returns of its kind are spread (pure).

`group`: the mean of the group's scored episodes. `leave_one_out`: of the others of them (RLOO,
arXiv:2402.14740 §2.2). `moving`: what the family's earlier episodes earned the agent. `none`: 0.

Each episode counts once, whatever its number of calls. Where its calls are paid alike, as they
are by default, mean and spread are those of the episodes' returns; else an episode's value is
the mean of its calls', and its part in the variance their mean squared distance from the mean.
"""

from collections.abc import Sequence
from math import fsum, sqrt
from typing import Literal

from store.records import Record
from trainer.credit.moving import Baselines
from trainer.means import mean_of, mean_square

NoSignal = Literal["alone", "no_spread"]


class Standing(Record, frozen=True, kw_only=True):
    """What an episode's returns are compared with, and divided by where that is the group's.

    `reason` says why the comparison tells nothing; `spread` is None where there is none.
    """

    baseline: float
    spread: float | None
    reason: NoSignal | None = None


def group_standings(members: Sequence[Sequence[float]]) -> list[Standing]:
    """Of each member of a group, from the returns of each one's calls."""
    mean = mean_of([mean_of(values) for values in members])
    spread = spread_about(mean, members)
    return [Standing(baseline=mean, spread=spread, reason=_reason(mean, members))] * len(members)


def leave_one_out_standings(members: Sequence[Sequence[float]]) -> list[Standing]:
    """Of each member of a group, compared with the others."""
    means = [mean_of(values) for values in members]
    mean = mean_of(means)
    spread, reason = spread_about(mean, members), _reason(mean, members)
    return [
        Standing(
            baseline=mean_of(means[:place] + means[place + 1 :]) if len(members) > 1 else 0.0,
            spread=spread,
            reason=reason,
        )
        for place in range(len(members))
    ]


def moving_standings(
    members: Sequence[Sequence[float]],
    family: str,
    agent: str,
    before: Baselines,
    after: Baselines,
) -> list[Standing]:
    """Of each return of an agent in an update, compared with what the family earned it before.

    A family first seen is compared with its own mean. The spread is the one after the update:
    after a hundred failures alike, the first success is not divided by nothing.
    """
    known = before.of(family, agent)
    mean = after.of(family, agent) if known is None else known
    spread = after.spread(family, agent)
    assert mean is not None
    reason: NoSignal | None = "no_spread" if _all_are(mean, members) else None
    if known is None and len(members) < 2:
        reason = "alone"
    return [Standing(baseline=mean, spread=spread, reason=reason)] * len(members)


def no_standings(members: Sequence[Sequence[float]]) -> list[Standing]:
    """Of returns that stand for themselves."""
    return [Standing(baseline=0.0, spread=None)] * len(members)


def spread_about(mean: float, members: Sequence[Sequence[float]]) -> float:
    """Sample standard deviation over members; 0 for one that is alone."""
    if len(members) < 2:
        return 0.0
    squares = [mean_square([value - mean for value in values]) for values in members]
    return sqrt(fsum(squares) / (len(members) - 1))


def _reason(mean: float, members: Sequence[Sequence[float]]) -> NoSignal | None:
    if len(members) < 2:
        return "alone"
    return "no_spread" if _all_are(mean, members) else None


def _all_are(mean: float, members: Sequence[Sequence[float]]) -> bool:
    return all(value == mean for values in members for value in values)
