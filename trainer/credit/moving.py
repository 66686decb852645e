"""Keep running averages of returns by task family and agent (pure).

They are the baselines of tasks that come only once, as in production, where an episode has no group
to be compared with (`baselines.family_baseline`). Every scored episode updates them, even if it has
a group, so that an average exists when it is needed.

The n returns of one update have no order, so each has the same weight in the average. Together they
weigh as much as n single steps, 1 − (1 − rate)ⁿ; the result is the mean over all orders of such
steps. While fewer than 1/rate returns were seen the average is the plain mean, so that the first
returns do not dominate for long.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from store.records import Record
from store.tenants import name_in_same_tenant
from trainer.credit.means import mean_of, mean_square

# The weight of each new return in an average.
RATE: Final = 0.05
# Only the most frequent families are kept: task names that never repeat (a random id for
# each task) would otherwise make the record grow without end.
MAX_FAMILIES: Final = 200
# The name of the family of all of a tenant's episodes, which stands in for families seen only once.
EVERY_FAMILY: Final = "*"


class MovingAverage(Record, frozen=True, kw_only=True):
    """Mean, variance and number of a family's returns for one agent."""

    mean: float
    variance: float
    count: int


NEVER_SEEN: Final = MovingAverage(mean=0.0, variance=0.0, count=0)
Averages = Mapping[str, Mapping[str, MovingAverage]]
# Returns by family and agent.
NewReturns = Mapping[tuple[str, str], Sequence[float]]


class MovingBaselines(Record, frozen=True, kw_only=True):
    """A policy's moving averages by family and agent, before or after an update.

    `families` has the averages of final rewards, `airs` those of AIR.
    """

    families: Mapping[str, Mapping[str, MovingAverage]] = {}
    airs: Mapping[str, Mapping[str, MovingAverage]] = {}

    def final_average(self, family: str, agent: str) -> MovingAverage:
        """Return an agent's average final reward in a family; of fewer than two, in the tenant."""
        return _family_or_tenant_average(self.families, family, agent)

    def air_average(self, family: str, agent: str) -> MovingAverage:
        """Return an agent's average AIR in a family; of fewer than two, in the tenant."""
        return _family_or_tenant_average(self.airs, family, agent)

    def updated(self, finals: NewReturns, airs: NewReturns) -> "MovingBaselines":
        """Return the baselines after an update with these final rewards and AIR.

        The average of a new family and agent starts as the mean of its returns.
        """
        return MovingBaselines(
            families=_update_averages(self.families, finals), airs=_update_averages(self.airs, airs)
        )

    def pruned(self) -> "MovingBaselines":
        """Return the averages of the `MAX_FAMILIES` most frequent families, sorted by name."""

        def seen(family: str) -> int:
            return sum(average.count for average in self.families[family].values())

        def kept(averages: Averages) -> dict[str, Any]:
            return {
                name: dict(sorted(averages[name].items())) for name in names if name in averages
            }

        most_seen = sorted(self.families, key=lambda family: (-seen(family), family))
        names = sorted(most_seen[:MAX_FAMILIES])
        return MovingBaselines(families=kept(self.families), airs=kept(self.airs))


# The baselines of a policy that was never trained.
NO_MOVING_BASELINES: Final = MovingBaselines()


def _family_or_tenant_average(averages: Averages, family: str, agent: str) -> MovingAverage:
    of_family, of_tenant = (
        averages.get(name, {}).get(agent, NEVER_SEEN)
        for name in (family, name_in_same_tenant(family, EVERY_FAMILY))
    )
    return of_family if of_family.count > 1 else of_tenant


def _update_averages(averages: Averages, returns: NewReturns) -> Averages:
    families = {family: dict(agents) for family, agents in averages.items()}
    by_tenant: dict[tuple[str, str], list[float]] = {}
    for (family, agent), values in returns.items():
        by_tenant.setdefault((name_in_same_tenant(family, EVERY_FAMILY), agent), []).extend(values)
    for (family, agent), values in sorted((by_tenant | dict(returns)).items()):
        agents = families.setdefault(family, {})
        agents[agent] = _mix_into_average(agents.get(agent), values)
    return families


def _mix_into_average(before: MovingAverage | None, values: Sequence[float]) -> MovingAverage:
    """Return the average `before` (None: no returns yet) with new returns mixed in.

    Mean and variance are those of a mixture of two distributions, the old one with weight
    1 − share and the new one with weight share (law of total variance).
    """
    mean = mean_of(values)
    variance = mean_square([value - mean for value in values])
    count = len(values)
    if before is None:
        return MovingAverage(mean=mean, variance=variance, count=count)
    share = max(1 - (1 - RATE) ** count, count / (before.count + count))
    moved = before.mean + share * (mean - before.mean)
    old = before.variance + (before.mean - moved) ** 2
    new = variance + (mean - moved) ** 2
    mixed = (1 - share) * old + share * new
    return MovingAverage(mean=moved, variance=mixed, count=before.count + count)
