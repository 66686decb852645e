"""Define what a normalisation is: it scales differences from a baseline (pure)."""

from collections.abc import Sequence
from typing import Literal, Protocol

from trainer.credit.baselines.baseline import BaselineValue

# One sequence of call returns for each compared episode, minus their baseline.
Differences = Sequence[Sequence[float]]


class Normalisation(Protocol):
    """Scale differences from a baseline, and say which spread they are divided by."""

    @property
    def spread_over(self) -> Literal["baseline", "update"] | None:
        """Return which returns the spread is taken over, or None if nothing is divided.

        `baseline`: those that the baseline is taken over; `update`: all of the update. PPO has no
        baseline among returns, and normalises its own advantages over the update.
        """

    def normalised(
        self, differences: Differences, baselines: Sequence[BaselineValue], smallest_spread: float
    ) -> list[list[float]]:
        """Return the differences of an update, scaled.

        `baselines` are the values that were subtracted, one for each episode. A spread below
        `smallest_spread` is replaced by it: differences that small carry no signal and must not be
        amplified.
        """
