"""Define what a baseline is: it gives the values that returns are compared with (pure)."""

from typing import Literal, Protocol

from store.records import Record
from trainer.credit.moving import MovingBaselines

NoSignal = Literal["alone", "no_spread"]


class BaselineValue(Record, frozen=True, kw_only=True):
    """Hold the value that an episode's returns are compared with, and the spread of such returns.

    `spread` is None if there are no comparable returns. `reason` says why the comparison
    gives no signal: the episode is `alone`, or all returns are equal (`no_spread`).
    """

    value: float
    spread: float | None
    reason: NoSignal | None = None


class ComparedReturns(Record, frozen=True, kw_only=True):
    """Hold the returns that are compared with each other, and the moving averages.

    `returns` has one sequence of call returns for each compared episode, or for each agent of an
    episode if agents are compared with themselves. They are those of one group and agent (`""`:
    of all agents together), or of one task family and agent for a baseline that needs moving
    averages. `before` and `after` are the moving averages before and after the update.
    """

    returns: tuple[tuple[float, ...], ...]
    family: str
    agent: str
    before: MovingBaselines
    after: MovingBaselines


class Baseline(Protocol):
    """Give the values that returns are compared with, and say what is needed for that.

    `needs_group` says that an episode is compared with others of its group: recipes must not
    allow groups of one, and members that earlier updates consumed are compared, too.
    `needs_moving_averages` says that averages by task family and agent are carried from update to
    update. `is_zero` says that every value is 0: PPO, whose critic is the baseline, allows no
    other.
    """

    needs_group: bool
    needs_moving_averages: bool
    is_zero: bool

    def values(self, compared: ComparedReturns) -> list[BaselineValue]:
        """Return the value for each of `compared.returns`, in the same order.

        Each episode counts once, whatever its number of calls. Returns come in any order, which
        must not change a bit of the result: use `trainer.credit.means`.
        """
