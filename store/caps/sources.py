"""Count what an update has of each API key and each task, and what it may have (pure).

A cap is a share of a whole update: one of fewer groups takes a step that is smaller by as much, so
that no key moves the policy by more than that share of a whole step, whoever else is there
(docs/decisions/092-caps-per-key-and-per-task.md).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Final, Literal, NamedTuple
from uuid import UUID

from store.records import Record

Kind = Literal["key", "task"]
# What came without a key counts as one key.
NO_KEY: Final = ""
# So that 0.29 of a hundred is 29, whatever 0.29 * 100 is rounded to.
ROUNDING: Final = 1e-9


class Source(NamedTuple):
    """Name what an episode counts for: the API key of its first call, or its task."""

    kind: Kind
    name: str


class GroupMember(NamedTuple):
    """Name an episode that waits, and what it counts for."""

    id: UUID
    sources: tuple[Source, ...]


class Candidate(Record, frozen=True, kw_only=True):
    """Describe a group that an update could take, of one episode or of several.

    `name` tells it from others of one selection; `age_s` is how long it has waited, and `earlier`
    are members that earlier updates consumed.
    """

    name: str
    has_signal: bool
    age_s: float
    members: tuple[GroupMember, ...]
    earlier: int = 0

    @property
    def sources(self) -> Counter[Source]:
        """Return how many of its members count for each source."""
        return Counter(source for member in self.members for source in member.sources)


def sources_of(caps: Mapping[Kind, float], key: str | None, task: str | None) -> tuple[Source, ...]:
    """Return what an episode counts for, of the kinds that are capped.

    An episode without a task is of no task; one without a key is of the key `NO_KEY`.
    """
    names: dict[Kind, str | None] = {"key": key or NO_KEY, "task": task}
    return tuple(Source(kind, name) for kind in caps if (name := names[kind]) is not None)


def limit_of(cap: float, episodes: float, group_size: int) -> int:
    """Return how many of so many episodes a cap allows: a group at least, which is taken whole."""
    return max(group_size, int(cap * episodes + ROUNDING))


def whole_size(episodes: int, groups: int, of: int) -> float:
    """Return how many episodes an update of `groups` groups would have if it had `of`, or more.

    Its step is `groups / of` of a whole one. So a source with a share of this many episodes moves
    the policy by that share of a whole step.
    """
    return float(episodes) if groups >= of else episodes * of / max(groups, 1)


class Tally:
    """Hold the candidates that were taken, and how many episodes they have of each source."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.taken: dict[str, Candidate] = {}
        self.counts: Counter[Source] = Counter()

    def take(self, candidate: Candidate) -> None:
        """Take a candidate, whatever its sources have."""
        self.taken[candidate.name] = candidate
        self.counts += candidate.sources

    def over(self, limits: Mapping[Kind, int], also: Candidate | None = None) -> list[Source]:
        """Return the sources that have more than their limits, with another candidate or none."""
        added = Counter[Source]() if also is None else also.sources
        looked_at = self.counts if also is None else added
        return [
            source
            for source in sorted(looked_at)
            if self.counts[source] + added[source] > limits.get(source.kind, inf)
        ]

    def of_kind(self, *, has_signal: bool) -> int:
        """Return how many candidates with signal, or without, were taken."""
        return sum(one.has_signal == has_signal for one in self.taken.values())

    @property
    def episodes(self) -> int:
        """Return how many episodes were taken."""
        return sum(len(one.members) for one in self.taken.values())


def ages(
    candidates: Iterable[Candidate],
    full: Collection[Source],
    trained_s: Callable[[Source], float | None],
) -> list[float]:
    """Return how long each candidate has waited, in seconds.

    Of a source in `full` more waits than an update takes, so what it has left is always old. It
    counts as waiting since an update trained on any of that source: `trained_s` seconds ago.
    """
    ages_s = []
    for one in candidates:
        since = [trained_s(source) for source in one.sources if source in full]
        ages_s.append(min([one.age_s, *(seconds for seconds in since if seconds is not None)]))
    return ages_s


def whole_updates(sizes: Sequence[float], groups: int, cap: float) -> float:
    """Return how many whole updates of `groups` groups there could be.

    Args:
        sizes: how many groups wait of each source.
        groups: groups in a whole update.
        cap: the largest share of it that one source may have.

    Returns:
        Their number; below 1 which part of one. A source that is alone may have all.
    """
    total = float(sum(sizes))
    if cap >= 1.0 or len(sizes) < 2:
        return total / groups
    first = sum(min(size, cap * groups) for size in sizes) / groups
    if first < 1 - ROUNDING:
        return first
    # The largest have in each as much as they may; the others have what is left of it.
    rest, left, updates = total, 1.0, first
    for size in sorted(sizes, reverse=True):
        updates = rest / (groups * left)
        if size <= cap * groups * updates * (1 + ROUNDING):
            break
        rest, left = rest - size, left - cap
    return updates
