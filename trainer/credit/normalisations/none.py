"""Leave differences as they are (Dr. GRPO, arXiv:2503.20783 §3.2; pure)."""

from collections.abc import Sequence
from typing import Final

from trainer.credit.baselines.baseline import BaselineValue
from trainer.credit.normalisations.normalisation import Differences, Normalisation


class Unscaled:
    """Divide by nothing."""

    spread_over: Final = None

    def normalised(
        self, differences: Differences, baselines: Sequence[BaselineValue], smallest_spread: float
    ) -> list[list[float]]:
        """Return the differences as they are."""
        return [list(own) for own in differences]


NORMALISATION: Final[Normalisation] = Unscaled()
