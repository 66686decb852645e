"""Choose what an update takes, as `store.updates.ready` does in SQL.

The choice between groups is the product's own function. The order is written here once more, and
`tests/integration/store/updates/test_order_of_claims.py` compares both.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.durations.load import Episode
from store.records import Record
from store.updates.choice import chosen_groups
from store.updates.ready import EARLIER_UPDATES, ClaimRule

MINUTE_S = 60.0
Key = tuple[Any, ...]


class Ready(Record, frozen=True, kw_only=True):
    """Hold a group that may be taken: what `chosen_groups` and the order look at."""

    task: int
    age_s: float
    has_signal: bool
    first: float
    last: float
    newest: int


def latest_minute_first(minute_of: float, version: int, at: float, tie: int) -> Key:
    """Return the order of the claim: by the minute of the reward, then by version, then by age."""
    return -(minute_of // MINUTE_S), -version, at, tie


def newest_version_first(minute_of: float, version: int, at: float, tie: int) -> Key:
    """Return the order that the claim had before: by version, then by age."""
    return -version, at, tie


Order = Callable[[float, int, float, int], Key]


class Waiting:
    """Hold the scored episodes that nobody has claimed, by task."""

    def __init__(self, rule: ClaimRule, order: Order) -> None:
        """Begin with none; groups are taken in `order`."""
        self._rule = rule
        self._order = order
        self._by_task: dict[int, list[Episode]] = {}
        # What the last updates consumed: by update, and by task.
        self._updates: list[list[Episode]] = []
        self._earlier: dict[int, list[Episode]] = {}

    def add(self, episode: Episode) -> None:
        """Add an episode that was just scored."""
        self._by_task.setdefault(episode.task, []).append(episode)

    def expire(self, oldest: int) -> list[Episode]:
        """Take out, and return, the episodes of versions before `oldest`."""
        stale = [one for own in self._by_task.values() for one in own if one.version < oldest]
        self._remove(stale)
        return stale

    def claim(self, now: float, oldest: int, *, whole: bool) -> list[tuple[Ready, list[Episode]]]:
        """Take out the groups of the next update, or none while there are too few.

        With `whole` it takes up to the rule's `most_groups`, not `groups`.
        """
        most = (whole and self._rule.most_groups) or self._rule.groups
        ready = [
            found
            for task, own in self._by_task.items()
            if (found := self._ready(task, own, oldest, now)) is not None
        ]
        chosen = chosen_groups(self._first(ready, most), self._rule)
        taken = [(one, self._members(one.task)) for one in chosen]
        self._consume([one for _, group in taken for one in group])
        return taken

    def _consume(self, taken: Sequence[Episode]) -> None:
        """Keep what an update takes for members of the same tasks that come later."""
        self._remove(taken)
        if taken:
            self._updates.append(list(taken))
        for one in taken:
            self._earlier.setdefault(one.task, []).append(one)
        while len(self._updates) > EARLIER_UPDATES:
            for one in self._updates.pop(0):
                self._earlier[one.task].remove(one)

    def _ready(self, task: int, own: Sequence[Episode], oldest: int, now: float) -> Ready | None:
        rule = self._rule
        earlier = [one for one in self._earlier.get(task, ()) if one.version >= oldest]
        first = min(one.scored for one in own)
        is_whole = len(own) >= rule.group_size
        is_late = len(own) + len(earlier) >= rule.smallest_group and now - first > rule.max_age_s
        if not is_whole and not is_late:
            return None
        compared = own if is_whole else [*own, *earlier]
        return Ready(
            task=task,
            age_s=now - first,
            has_signal=len({one.reward for one in compared}) > 1,
            first=first,
            last=max(one.scored for one in own),
            newest=max(one.version for one in own),
        )

    def _first(self, ready: Iterable[Ready], most: int) -> list[Ready]:
        """Return the groups to choose from, in order: as many of either kind as an update takes."""
        placed = sorted(
            ready, key=lambda one: self._order(one.last, one.newest, one.first, one.task)
        )
        with_signal = [one for one in placed if one.has_signal][:most]
        without = [one for one in placed if not one.has_signal][:most]
        kept = {one.task for one in (*with_signal, *without)}
        return [one for one in placed if one.task in kept]

    def _members(self, task: int) -> list[Episode]:
        placed = sorted(
            self._by_task[task],
            key=lambda one: self._order(one.scored, one.version, one.scored, one.number),
        )
        return placed[: self._rule.group_size]

    def _remove(self, gone: Iterable[Episode]) -> None:
        for one in list(gone):
            own = self._by_task[one.task]
            own.remove(one)
            if not own:
                del self._by_task[one.task]
