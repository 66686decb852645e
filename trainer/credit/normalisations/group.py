"""Divide by the spread that belongs to the baseline (GRPO, arXiv:2402.03300 §4.1.2; pure)."""

from collections.abc import Sequence
from typing import Final

from trainer.credit.baselines.baseline import BaselineValue
from trainer.credit.normalisations.normalisation import Differences, Normalisation


class BaselineSpread:
    """Divide by the spread of the returns that the baseline is taken over."""

    spread_over: Final = "baseline"

    def centred(
        self, differences: Differences, baselines: Sequence[BaselineValue]
    ) -> list[list[float]]:
        """Return the differences as they are: the baseline is their centre."""
        return [list(own) for own in differences]

    def spreads(
        self, differences: Differences, baselines: Sequence[BaselineValue]
    ) -> list[float | None]:
        """Return each baseline's spread; None where it has none."""
        return [baseline.spread for baseline in baselines]


NORMALISATION: Final[Normalisation] = BaselineSpread()
