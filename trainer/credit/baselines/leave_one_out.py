"""Compare an episode with the mean of its group's others (RLOO, arXiv:2402.14740 §2; pure)."""

from typing import Final

from trainer.credit.baselines.baseline import Baseline, BaselineValue, ComparedReturns
from trainer.credit.baselines.spread import no_signal_reason, spread_about
from trainer.credit.means import mean_of


class LeaveOneOutMean:
    """Give the mean of the group's other scored episodes."""

    needs_group = True
    needs_moving_averages = False
    is_zero = False

    def values(self, compared: ComparedReturns) -> list[BaselineValue]:
        """Return for each episode of a group the mean of the others.

        The spread is the whole group's. An episode that is alone has the value 0.
        """
        returns = compared.returns
        means = [mean_of(values) for values in returns]
        mean = mean_of(means)
        spread, reason = spread_about(mean, returns), no_signal_reason(mean, returns)
        return [
            BaselineValue(
                value=mean_of(means[:place] + means[place + 1 :]) if len(returns) > 1 else 0.0,
                spread=spread,
                reason=reason,
            )
            for place in range(len(returns))
        ]


BASELINE: Final[Baseline] = LeaveOneOutMean()
