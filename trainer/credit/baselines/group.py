"""Compare an episode with the mean of its group (GRPO, arXiv:2402.03300 §4.1.2; pure)."""

from typing import Final

from trainer.credit.baselines.baseline import Baseline, BaselineValue, ComparedReturns
from trainer.credit.baselines.spread import no_signal_reason, spread_about
from trainer.credit.means import mean_of


class GroupMean:
    """Give the mean of the group's scored episodes."""

    needs_group = True
    needs_moving_averages = False
    is_zero = False

    def values(self, compared: ComparedReturns) -> list[BaselineValue]:
        """Return the group's mean for each of its episodes."""
        returns = compared.returns
        mean = mean_of([mean_of(values) for values in returns])
        value = BaselineValue(
            value=mean, spread=spread_about(mean, returns), reason=no_signal_reason(mean, returns)
        )
        return [value] * len(returns)


BASELINE: Final[Baseline] = GroupMean()
