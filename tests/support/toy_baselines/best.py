"""Compare an episode with the best of its group: a baseline in one file, for tests."""

from typing import Final

from trainer.credit.baselines.baseline import Baseline, BaselineValue, ComparedReturns
from trainer.credit.baselines.spread import no_signal_reason, spread_about
from trainer.credit.means import mean_of


class BestOfGroup:
    """Give the highest mean return of the group's episodes."""

    needs_group = True
    needs_moving_averages = False
    is_zero = False

    def values(self, compared: ComparedReturns) -> list[BaselineValue]:
        """Return the best episode's mean return for each of the group's episodes."""
        returns = compared.returns
        best = max(mean_of(values) for values in returns)
        value = BaselineValue(
            value=best, spread=spread_about(best, returns), reason=no_signal_reason(best, returns)
        )
        return [value] * len(returns)


BASELINE: Final[Baseline] = BestOfGroup()
