"""Estimate each task family's mean, from episodes of both arms alike."""

from typing import Final

# A family's mean counts as if this many episodes had scored as all families do together.
PRIOR: Final = 5
# Families past these are centred by the mean of all: memory is bounded.
MOST_FAMILIES: Final = 10_000


class Centres:
    """Keep the mean of each family, pulled towards the mean of all while it has few episodes."""

    def __init__(self) -> None:
        """Start from the middle of the range."""
        self._all = (0.5, 1)
        self._families: dict[str, tuple[float, int]] = {}

    def add(self, family: str, value: float) -> None:
        """Count one more value of 0 to 1."""
        total, count = self._all
        self._all = (total + value, count + 1)
        if family in self._families or len(self._families) < MOST_FAMILIES:
            total, count = self._families.get(family, (0.0, 0))
            self._families[family] = (total + value, count + 1)

    def of(self, family: str) -> float:
        """Return the family's mean, of 0 to 1."""
        all_total, all_count = self._all
        total, count = self._families.get(family, (0.0, 0))
        return (total + PRIOR * all_total / all_count) / (count + PRIOR)
