"""Compare an episode with what earlier ones of its task's family earned the agent (pure).

This is the baseline of REINFORCE with baseline (Sutton & Barto, 2nd ed., §13.4), with the
moving averages of `trainer.credit.moving`.
"""

from typing import Final

from trainer.credit.baselines.baseline import Baseline, BaselineValue, ComparedReturns, NoSignal
from trainer.credit.baselines.spread import are_all_equal


class MovingMean:
    """Give the moving average of a task family and agent."""

    needs_group = False
    needs_moving_averages = True
    is_zero = False

    def values(self, compared: ComparedReturns) -> list[BaselineValue]:
        """Return for each episode the moving average of its family and agent before the update.

        The first update of a family is compared with its own mean. The spread is the one after
        the update: after a hundred equal failures the spread before it is 0, and the first
        success would be divided by nothing.
        """
        returns, family, agent = compared.returns, compared.family, compared.agent
        known = compared.before.mean(family, agent)
        mean = compared.after.mean(family, agent) if known is None else known
        assert mean is not None
        reason: NoSignal | None = "no_spread" if are_all_equal(mean, returns) else None
        if known is None and len(returns) < 2:
            reason = "alone"
        spread = compared.after.spread(family, agent)
        return [BaselineValue(value=mean, spread=spread, reason=reason)] * len(returns)


BASELINE: Final[Baseline] = MovingMean()
