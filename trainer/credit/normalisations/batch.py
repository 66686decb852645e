"""Subtract the update's mean, and divide by its spread (REINFORCE++, arXiv:2501.03262 §3; pure)."""

from collections.abc import Sequence
from typing import Final

from trainer.credit.baselines.baseline import BaselineValue
from trainer.credit.baselines.spread import spread_about
from trainer.credit.means import mean_of
from trainer.credit.normalisations.normalisation import Differences, Normalisation


class UpdateSpread:
    """Centre and divide by mean and spread over the update; episodes alone do not count."""

    spread_over: Final = "update"

    def centred(
        self, differences: Differences, baselines: Sequence[BaselineValue]
    ) -> list[list[float]]:
        """Return the differences minus their mean."""
        compared = _compared(differences, baselines)
        mean = mean_of([mean_of(own) for own in compared]) if compared else 0.0
        return [[difference - mean for difference in own] for own in differences]

    def spreads(
        self, differences: Differences, baselines: Sequence[BaselineValue]
    ) -> list[float | None]:
        """Return the update's spread for each episode."""
        return [spread_about(0.0, _compared(differences, baselines))] * len(differences)


def _compared(
    differences: Differences, baselines: Sequence[BaselineValue]
) -> list[Sequence[float]]:
    return [
        own
        for own, baseline in zip(differences, baselines, strict=True)
        if baseline.reason != "alone"
    ]


NORMALISATION: Final[Normalisation] = UpdateSpread()
