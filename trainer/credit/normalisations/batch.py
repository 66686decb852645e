"""Subtract the update's mean, and divide by its spread (REINFORCE++, arXiv:2501.03262 §3; pure)."""

from collections.abc import Sequence
from typing import Final

from trainer.credit.baselines.baseline import BaselineValue
from trainer.credit.baselines.spread import spread_about
from trainer.credit.means import mean_of
from trainer.credit.normalisations.normalisation import Differences, Normalisation


class UpdateSpread:
    """Centre and divide by mean and spread over the update."""

    spread_over: Final = "update"

    def normalised(
        self, differences: Differences, baselines: Sequence[BaselineValue], smallest_spread: float
    ) -> list[list[float]]:
        """Return the differences minus their mean, by their spread; those alone do not count."""
        compared = [
            own
            for own, baseline in zip(differences, baselines, strict=True)
            if baseline.reason != "alone"
        ]
        mean = mean_of([mean_of(own) for own in compared]) if compared else 0.0
        divisor = max(spread_about(mean, compared), smallest_spread)
        return [[(difference - mean) / divisor for difference in own] for own in differences]


NORMALISATION: Final[Normalisation] = UpdateSpread()
