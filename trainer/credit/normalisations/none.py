"""Leave differences as they are (Dr. GRPO, arXiv:2503.20783 §3.2; pure)."""

from collections.abc import Sequence
from typing import Final

from trainer.credit.baselines.baseline import BaselineValue
from trainer.credit.normalisations.normalisation import Differences, Normalisation


class Unscaled:
    """Divide by nothing."""

    spread_over: Final = None

    def centred(
        self, differences: Differences, baselines: Sequence[BaselineValue]
    ) -> list[list[float]]:
        """Return the differences as they are."""
        return [list(own) for own in differences]

    def spreads(
        self, differences: Differences, baselines: Sequence[BaselineValue]
    ) -> list[float | None]:
        """Return None for each episode."""
        return [None] * len(differences)


NORMALISATION: Final[Normalisation] = Unscaled()
