"""The moving baseline: what episodes of a family have earned an agent so far (pure).

For tasks that are seen once, as production's are: an exponential moving average takes the
group's place (REINFORCE's baseline, Sutton & Barto §13.4). n returns that come in one update
have no order among each other. Their share in the average is the one that they would have one
after the other, 1 − (1 − rate)ⁿ, and the same for each: the mean over all orders. While fewer
than 1/rate were seen the average is the plain mean, so that the first ones do not stand for long.
"""

import re
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Final

from store.records import Record
from trainer.means import mean_of, mean_square

# Past so many families the least seen are forgotten: names that never come again (a random id
# a task) would grow without end.
MOST_FAMILIES: Final = 1000

_FAMILY: Final = re.compile(r"[^/:]*")
_NUMBER: Final = re.compile(r"[\W_]*\d+$")


def task_family(task: str | None) -> str:
    """The tasks that share a baseline: `refunds/17`, `refunds:x` and `refunds-17` are `refunds`.

    What is before the first `/` or `:`; where there is neither, the name less the number that it
    ends with. Episodes without a task are a family, and so are those that named none
    (`prompt:…`).
    """
    name = task or ""
    family = _FAMILY.match(name)
    assert family is not None
    return family[0] if family[0] != name else _NUMBER.sub("", name)


class Moving(Record, frozen=True, kw_only=True):
    """Mean and variance of a family's returns for an agent; `count` of them were seen."""

    mean: float
    variance: float
    count: int


class Baselines(Record, frozen=True, kw_only=True):
    """The moving baselines of a policy, by family and agent, as an update found or left them."""

    families: Mapping[str, Mapping[str, Moving]] = {}

    def of(self, family: str, agent: str) -> float | None:
        """The mean; None for what was never seen."""
        found = self.families.get(family, {}).get(agent)
        return None if found is None else found.mean

    def spread(self, family: str, agent: str) -> float | None:
        """The standard deviation; None for what was never seen."""
        found = self.families.get(family, {}).get(agent)
        return None if found is None else sqrt(found.variance)

    def advanced(
        self, returns: Mapping[tuple[str, str], Sequence[float]], rate: float
    ) -> "Baselines":
        """The baselines after an update with these returns, by family and agent.

        A family and agent that were never seen start with the mean of theirs.
        """
        families = {family: dict(agents) for family, agents in self.families.items()}
        for (family, agent), values in sorted(returns.items()):
            agents = families.setdefault(family, {})
            agents[agent] = _advance(agents.get(agent), values, rate)
        return Baselines(families=families)

    def kept(self) -> "Baselines":
        """What is written down: at most `MOST_FAMILIES`, in the order of their names."""

        def seen(family: str) -> int:
            return sum(moving.count for moving in self.families[family].values())

        often = sorted(self.families, key=lambda family: (-seen(family), family))[:MOST_FAMILIES]
        return Baselines(
            families={
                family: dict(sorted(self.families[family].items())) for family in sorted(often)
            }
        )


# Of a policy that was never trained.
NO_BASELINES: Final = Baselines()


def _advance(before: Moving | None, values: Sequence[float], rate: float) -> Moving:
    mean = mean_of(values)
    variance = mean_square([value - mean for value in values])
    count = len(values)
    if before is None:
        return Moving(mean=mean, variance=variance, count=count)
    share = max(1 - (1 - rate) ** count, count / (before.count + count))
    moved = before.mean + share * (mean - before.mean)
    return Moving(
        mean=moved,
        variance=(1 - share) * (before.variance + (before.mean - moved) ** 2)
        + share * (variance + (mean - moved) ** 2),
        count=before.count + count,
    )
