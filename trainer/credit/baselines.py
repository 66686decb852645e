"""Compare returns: the baselines and normalisations that recipes may name (pure).

A baseline gives the value that an episode's return is compared with, and the spread of such
returns. An episode alone in its group is compared with its task family's moving average
(`family_baseline`). A normalisation says by which spread the difference is divided.

Each episode counts once, whatever its number of calls: its value is the mean of its calls' returns,
and its part in a variance is their mean squared difference from the baseline's mean. By default all
calls of an episode have the same return, and this is the usual mean and sample variance of the
episodes' returns.

To add a baseline, write a class here and name it in `BASELINES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import fsum, sqrt
from typing import Final, Literal

import msgspec

from store.records import Record
from trainer.credit.means import mean_of, mean_square
from trainer.credit.moving import MovingAverage

NoSignal = Literal["alone", "no_spread"]


class BaselineValue(Record, frozen=True, kw_only=True):
    """The value that an episode's returns are compared with, and the spread of such returns.

    `spread` is None if there are no comparable returns. `reason` says why the comparison gives no
    signal: all returns are equal (`no_spread`), or there was never another return (`alone`).
    """

    value: float
    spread: float | None
    reason: NoSignal | None = None


# Returns that are compared with each other: for each episode of a group the returns of its calls
# (with the assignment per_agent: of one agent's calls). The order of episodes does not matter.
ComparedReturns = Sequence[Sequence[float]]


class Baseline(ABC):
    """A rule for the values that returns are compared with.

    If `needs_group` is true, an episode is compared with the others of its group, including those
    that earlier updates consumed. If it is alone in its group, it is compared with a moving average
    (`family_baseline`). PPO allows no baseline with `needs_group`: its critic is the baseline.
    """

    needs_group: bool = False

    @abstractmethod
    def values(self, returns: ComparedReturns) -> list[BaselineValue]:
        """Return the value for each of `returns`, in the same order.

        The order of `returns` must not change a bit of any value: use `mean_of`. With `needs_group`
        there are two `returns` or more.
        """


class GroupMean(Baseline):
    """Baseline: the mean return of the group's scored episodes (GRPO, arXiv:2402.03300 §4.1.2)."""

    needs_group = True

    def values(self, returns: ComparedReturns) -> list[BaselineValue]:
        mean = mean_of([mean_of(values) for values in returns])
        value = BaselineValue(
            value=mean, spread=spread_about(mean, returns), reason=no_spread(mean, returns)
        )
        return [value] * len(returns)


class LeaveOneOutMean(GroupMean):
    """Baseline: the mean return of the group's other scored episodes (RLOO, arXiv:2402.14740)."""

    def values(self, returns: ComparedReturns) -> list[BaselineValue]:
        """Return for each episode the others' mean return; the spread is the whole group's."""
        means = [mean_of(values) for values in returns]
        return [
            msgspec.structs.replace(of_group, value=mean_of(means[:place] + means[place + 1 :]))
            for place, of_group in enumerate(super().values(returns))
        ]


class Zero(Baseline):
    """Baseline 0: the difference is the return itself. For learners with their own baseline."""

    def values(self, returns: ComparedReturns) -> list[BaselineValue]:
        return [BaselineValue(value=0.0, spread=None)] * len(returns)


BASELINES: Final[dict[str, Baseline]] = {
    "group": GroupMean(),
    "leave_one_out": LeaveOneOutMean(),
    "none": Zero(),
}


def family_baseline(returns: Sequence[float], average: MovingAverage) -> BaselineValue:
    """Return the baseline of an episode that has no group to differ from: its family's average.

    This is the baseline of REINFORCE (Sutton & Barto, 2nd ed., §13.4). `average` must already
    include the update's own episodes, because a policy improves faster than an average of the past.
    So the spread is not 0 at the first success after a hundred failures, and a new family has an
    average at once.
    """
    reason: NoSignal | None = no_spread(average.mean, [returns])
    if average.count < 2:
        reason = "alone"
    return BaselineValue(value=average.mean, spread=sqrt(average.variance), reason=reason)


def spread_about(mean: float, returns: Sequence[Sequence[float]]) -> float:
    """Return the sample standard deviation over episodes (divisor n − 1), 0 for a single one.

    An episode's part is the mean squared difference of its calls' returns from `mean`.
    """
    if len(returns) < 2:
        return 0.0
    squares = [mean_square([value - mean for value in values]) for values in returns]
    return sqrt(fsum(squares) / (len(returns) - 1))


def no_spread(mean: float, returns: Sequence[Sequence[float]]) -> NoSignal | None:
    """Return "no_spread" if all returns equal `mean`, else None."""
    differ = any(value != mean for values in returns for value in values)
    return None if differ else "no_spread"


class Normalisation(Record, frozen=True, kw_only=True):
    """How differences from a baseline are divided by a spread of final rewards.

    Differences of final rewards and of AIR are divided by the same spread, each with a lower limit
    of its own (`trainer.credit.advantages`). PPO has no baseline among returns, and normalises its
    own advantages over the update.

    Attributes:
        spread_over: the spread to divide by. "baseline": that of the returns behind the baseline.
            "update": that of the update's differences, after subtracting their mean, and without
            episodes that are alone. None: there is no division.
        is_focal: whether differences count for less if most of the compared episodes succeed. More
            training would only make the policy more certain of these successes, at the cost of
            tasks with similar words.
    """

    spread_over: Literal["baseline", "update"] | None = None
    is_focal: bool = False


NORMALISATIONS: Final[dict[str, Normalisation]] = {
    # REINFORCE++ (arXiv:2501.03262 §3)
    "batch": Normalisation(spread_over="update"),
    # F-GRPO (arXiv:2602.06717, γ = 1)
    "focal": Normalisation(spread_over="baseline", is_focal=True),
    # GRPO (arXiv:2402.03300 §4.1.2)
    "group": Normalisation(spread_over="baseline"),
    # Dr. GRPO (arXiv:2503.20783 §3.2)
    "none": Normalisation(),
}
