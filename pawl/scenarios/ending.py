"""Decide when the waves of a run end, and how many there can be (pure)."""

from pawl.scenarios.progress import Progress
from store.records import Record


class Ending(Record, frozen=True, kw_only=True):
    """Say when a run's waves end.

    Attributes:
        learned: two waves in a row with at least this score end them.
        most_waves: so many end them as well.
        updates: so many updates end them, whatever was learned; then only time ends them before.
    """

    learned: float
    most_waves: int
    updates: int | None = None

    @property
    def waves(self) -> int:
        """Return how many waves there can be.

        Of an update that trains nothing no version comes, and it does not count for `updates`.
        """
        return self.most_waves if self.updates is None else max(self.most_waves, 2 * self.updates)

    def is_reached(self, progress: Progress) -> bool:
        """Return whether no further wave is to begin, once the last one's update is done."""
        if len(progress.waves) >= self.waves or _time_is_up(progress):
            return True
        if self.updates is not None:
            return len(progress.done_updates) >= self.updates
        last = progress.waves[-2:]
        return len(last) == 2 and all(wave.success >= self.learned for wave in last)


def _time_is_up(progress: Progress) -> bool:
    """Return whether another wave of average length would pass the time limit."""
    per_wave = progress.seconds / max(1, len(progress.waves))
    return progress.seconds + per_wave > progress.minutes * 60
