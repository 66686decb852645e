"""Define what a normalisation is: it scales differences from a baseline (pure)."""

from collections.abc import Sequence
from typing import Literal, Protocol

from trainer.credit.baselines.baseline import BaselineValue

# One sequence of call returns for each compared episode, minus their baseline.
Differences = Sequence[Sequence[float]]


class Normalisation(Protocol):
    """Scale differences from a baseline, and say which spread they are divided by.

    The differences of final rewards and those of AIR are centred each by themselves, and divided
    by the spread of the final rewards, each with a lower limit of its own
    (`trainer.credit.advantages`).
    """

    @property
    def spread_over(self) -> Literal["baseline", "update"] | None:
        """Return which returns the spread is taken over, or None if nothing is divided.

        `baseline`: those that the baseline is taken over; `update`: all of the update. PPO has no
        baseline among returns, and normalises its own advantages over the update.
        """

    def centred(
        self, differences: Differences, baselines: Sequence[BaselineValue]
    ) -> list[list[float]]:
        """Return the differences of an update, or what is left of them without their mean.

        `baselines` are those of the final rewards, one for each episode.
        """

    def spreads(
        self, differences: Differences, baselines: Sequence[BaselineValue]
    ) -> list[float | None]:
        """Return for each episode the spread that its differences are divided by.

        None: they are not divided. `differences` are the centred ones of final rewards.
        """
