"""Divide by the spread that belongs to the baseline (GRPO, arXiv:2402.03300 §4.1.2; pure)."""

from collections.abc import Sequence
from typing import Final

from trainer.credit.baselines.baseline import BaselineValue
from trainer.credit.normalisations.normalisation import Differences, Normalisation


class BaselineSpread:
    """Divide by the spread of the returns that the baseline is taken over."""

    spread_over: Final = "baseline"

    def normalised(
        self, differences: Differences, baselines: Sequence[BaselineValue], smallest_spread: float
    ) -> list[list[float]]:
        """Return each difference by its baseline's spread; by 1 where the baseline has none."""
        return [
            [difference / _divisor(baseline, smallest_spread) for difference in own]
            for own, baseline in zip(differences, baselines, strict=True)
        ]


def _divisor(baseline: BaselineValue, smallest_spread: float) -> float:
    return 1.0 if baseline.spread is None else max(baseline.spread, smallest_spread)


NORMALISATION: Final[Normalisation] = BaselineSpread()
