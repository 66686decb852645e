"""Plan a run: turns without loads and turns with loads, one after the other (pure)."""

from collections.abc import Sequence
from typing import Final

from store.records import Record

MINUTE_S: Final = 60.0
# From when to when, in seconds of one clock.
Span = tuple[float, float]


class Schedule(Record, frozen=True, kw_only=True):
    """Say when which turn is. Of `turns`, every second one has loads; `began` is the first one's.

    Times are seconds of the clock of `time.monotonic`, which all processes of a machine share.
    """

    began: float
    turns: int
    turn_s: float
    loads: int

    @property
    def ends(self) -> float:
        """Return when the last turn ends."""
        return self.began + self.turns * self.turn_s

    def turn(self, number: int) -> Span:
        """Return when turn `number` begins and ends."""
        begins = self.began + number * self.turn_s
        return begins, begins + self.turn_s

    def has_loads(self, at: float) -> bool:
        """Return whether `at` is in a turn with loads."""
        number = int((at - self.began) // self.turn_s)
        return 0 <= number < self.turns and number % 2 == 1

    def due(self, at: float) -> int:
        """Return how many loads should have begun at `at`: they come evenly, in turns with loads.

        What was late in one turn with loads is due in the next.
        """
        if not self.has_loads(at):
            return 0
        number, into_s = divmod(at - self.began, self.turn_s)
        loading_s = number // 2 * self.turn_s + into_s
        apart_s = self.turns // 2 * self.turn_s / self.loads
        return min(self.loads, int(loading_s / apart_s) + 1)


def plan(began: float, minutes: float, loads: int) -> Schedule:
    """Return a schedule of turns of a minute, or of two turns if it is shorter than two minutes."""
    turns = max(2, 2 * int(minutes / 2))
    return Schedule(began=began, turns=turns, turn_s=minutes * MINUTE_S / turns, loads=loads)


def spans(schedule: Schedule, seen: Sequence[tuple[float, int]]) -> tuple[list[Span], list[Span]]:
    """Return the spans with loads, and those without, in each of which nothing is swapped.

    `seen` are moments and how many adapters were loaded then. A turn without loads counts from when
    all but one of the adapters were unloaded again that the turn before had loaded; if they never
    were, it does not count.
    """
    with_loads, without = [], []
    for number in range(schedule.turns):
        begins, ends = schedule.turn(number)
        if number % 2:
            with_loads.append((begins, ends))
            continue
        settled = next((at for at, loaded in seen if begins <= at < ends and loaded <= 1), ends)
        if settled < ends:
            without.append((settled, ends))
    return with_loads, without


def within(at: float, of: Sequence[Span]) -> bool:
    """Return whether `at` is in one of the spans."""
    return any(begins <= at < ends for begins, ends in of)
