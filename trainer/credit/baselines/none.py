"""Compare with 0, for learners that bring a baseline of their own (pure)."""

from typing import Final

from trainer.credit.baselines.baseline import Baseline, BaselineValue, ComparedReturns


class Zero:
    """Give 0: an episode's advantage is its return."""

    needs_group = False
    needs_moving_averages = False
    is_zero = True

    def values(self, compared: ComparedReturns) -> list[BaselineValue]:
        """Return 0 for each episode."""
        return [BaselineValue(value=0.0, spread=None)] * len(compared.returns)


BASELINE: Final[Baseline] = Zero()
