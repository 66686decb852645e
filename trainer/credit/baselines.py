"""Compare returns: the baselines and normalisations that recipes may name (pure).

A baseline gives the value that an episode's return is compared with, and the spread of such
returns. An episode without others in its group is compared with what its task family earns
(`family_value`). A normalisation says by which spread the difference is divided.

Each episode counts once, whatever its number of calls: its value is the mean of its calls' returns,
and its part in a variance is their mean squared difference from the baseline's mean. Where all its
calls have the same return, as they have by default, both are the usual mean and sample variance of
the episodes' returns.

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
    """Hold the value that an episode's returns are compared with, and the spread of such returns.

    `spread` is None if there are no comparable returns. `reason` says why the comparison gives no
    signal: all returns are equal (`no_spread`), or no other was ever seen (`alone`).
    """

    value: float
    spread: float | None
    reason: NoSignal | None = None


# The returns that are compared with each other, in any order: one sequence of call returns for each
# episode of a group, or for each agent of an episode if agents are compared with themselves.
ComparedReturns = Sequence[Sequence[float]]


class Baseline(ABC):
    """Give the values that returns are compared with, and say what is needed for that.

    `needs_group` says that an episode is compared with others of its group, those that earlier
    updates consumed among them; and by itself with a moving average (`family_value`). PPO, whose
    critic is the baseline, allows no such one.
    """

    needs_group: bool = False

    @abstractmethod
    def values(self, returns: ComparedReturns) -> list[BaselineValue]:
        """Return the value for each of `returns`, in the same order.

        Another order of returns must not change a bit of the result: use `mean_of`. With
        `needs_group` there are two or more.
        """


class GroupMean(Baseline):
    """Give the mean of the group's scored episodes (GRPO, arXiv:2402.03300 §4.1.2)."""

    needs_group = True

    def values(self, returns: ComparedReturns) -> list[BaselineValue]:
        """Return the group's mean for each of its episodes."""
        mean = mean_of([mean_of(values) for values in returns])
        value = BaselineValue(
            value=mean, spread=spread_about(mean, returns), reason=no_spread(mean, returns)
        )
        return [value] * len(returns)


class LeaveOneOutMean(GroupMean):
    """Give the mean of the group's other scored episodes (RLOO, arXiv:2402.14740 §2)."""

    def values(self, returns: ComparedReturns) -> list[BaselineValue]:
        """Return for each episode the mean of the others; the spread is the whole group's."""
        means = [mean_of(values) for values in returns]
        return [
            msgspec.structs.replace(of_group, value=mean_of(means[:place] + means[place + 1 :]))
            for place, of_group in enumerate(super().values(returns))
        ]


class Zero(Baseline):
    """Give 0: an episode's advantage is its return. For learners with a baseline of their own."""

    def values(self, returns: ComparedReturns) -> list[BaselineValue]:
        """Return 0 for each episode."""
        return [BaselineValue(value=0.0, spread=None)] * len(returns)


BASELINES: Final[dict[str, Baseline]] = {
    "group": GroupMean(),
    "leave_one_out": LeaveOneOutMean(),
    "none": Zero(),
}


def family_value(returns: Sequence[float], average: MovingAverage) -> BaselineValue:
    """Return what an episode by itself is compared with: its family's moving average.

    This is the baseline of REINFORCE (Sutton & Barto, 2nd ed., §13.4), moved by the update's own
    episodes first: a policy improves faster than an average of the past. So a success after a
    hundred equal failures is not divided by a spread of 0, and a new family is known at once.
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
    """Return "no_spread" if all returns are the mean that they are compared with, else None."""
    differ = any(value != mean for values in returns for value in values)
    return None if differ else "no_spread"


class Normalisation(Record, frozen=True, kw_only=True):
    """Say which spread of final rewards differences from a baseline are divided by.

    The differences of final rewards and those of AIR have the same spread, each with a lower limit
    of its own (`trainer.credit.advantages`). PPO has no baseline among returns, and normalises its
    own advantages over the update.

    Attributes:
        spread_over: what the spread is taken over: what the baseline is, or the whole update, whose
            mean difference is subtracted first; episodes that are alone count in neither. None:
            nothing is divided.
        is_focal: whether differences count for less where the compared episodes mostly succeed.
            What does would only be made more certain, at the cost of tasks that share its words.
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
