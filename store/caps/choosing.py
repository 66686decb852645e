"""Choose the groups of an update so that no API key and no task has more of it than its cap.

The groups are taken in the order of claims. A source that has as much as it may is *full*: what
else waits of it is looked past, and groups are formed of what is left, so that it keeps no other's
from being trained. Nothing is consumed for being looked past.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from store.caps.sources import (
    Candidate,
    Kind,
    Source,
    Tally,
    ages,
    limit_of,
    whole_size,
)
from store.records import Record

# The first candidates of either kind of signal, in order, of what does not count for some sources.
Look = Callable[[frozenset[Source]], Awaitable[Sequence[Candidate]]]
NOBODY: Final[frozenset[Source]] = frozenset()


class Sizes(Record, frozen=True, kw_only=True):
    """State what an update takes, as `store.updates.ready.ClaimRule` does.

    `groups` of `group_size` episodes are a whole update, which takes up to `most` groups.
    """

    groups: int
    most: int
    group_size: int
    max_age_s: float


class Past(Record, frozen=True, kw_only=True):
    """Tell of sources what the ledger knows: whose are alone, and when each was trained on last.

    A kind is in `lone` if all that waits, and all that the last updates took, is of one source.
    `trained_s` are the seconds since an update trained on a source; missing: none of the last did.
    """

    lone: frozenset[Kind]
    trained_s: Mapping[Source, float]


class Choosing:
    """Choose for one update; what was looked at is not looked at twice."""

    def __init__(
        self,
        caps: Mapping[Kind, float],
        sizes: Sizes,
        look: Look,
        recall: Callable[[], Awaitable[Past]],
    ) -> None:
        """Store the caps, and how to look at what waits and at the past.

        `recall` is asked only if a source would pass its cap.
        """
        self._caps = caps
        self._sizes = sizes
        self._look = look
        self._recall = recall
        self._looks: dict[frozenset[Source], Sequence[Candidate]] = {}
        self._past: Past | None = None

    async def choose(self) -> list[Candidate]:
        """Return the groups of the next update; none while there are too few."""
        tally, limits, full = await self._fit(has_signal=True)
        if self._is_enough(tally, full):
            await self._fill(tally, limits, full, has_signal=False)
            return list(tally.taken.values())
        tally, _, full = await self._fit(has_signal=False)
        return list(tally.taken.values()) if self._is_enough(tally, full) else []

    async def _fit(self, *, has_signal: bool) -> tuple[Tally, dict[Kind, int], set[Source]]:
        """Take groups of one kind, and fewer where they are too few for what a source has of them.

        Return them with the limits of what they come to, and the sources that are full.
        """
        sizes = self._sizes
        episodes = float(sizes.most * sizes.group_size)
        while True:
            tally, full = Tally(), set[Source]()
            await self._fill(tally, self._limits(episodes), full, has_signal=has_signal)
            episodes = whole_size(tally.episodes, len(tally.taken), sizes.groups)
            limits = self._limits(episodes)
            if not tally.over(limits):
                return tally, limits, full

    def _limits(self, episodes: float) -> dict[Kind, int]:
        lone = frozenset[Kind]() if self._past is None else self._past.lone
        size = self._sizes.group_size
        return {
            kind: limit_of(cap, episodes, size)
            for kind, cap in self._caps.items()
            if kind not in lone
        }

    async def _fill(
        self, tally: Tally, limits: dict[Kind, int], full: set[Source], *, has_signal: bool
    ) -> None:
        """Take candidates of one kind of signal until there are enough, or no more may be taken."""
        while True:
            looked = frozenset(full)
            for candidate in await self._seen(looked):
                if tally.of_kind(has_signal=has_signal) >= self._sizes.most:
                    return
                if candidate.has_signal == has_signal and candidate.name not in tally.taken:
                    await self._consider(candidate, tally, limits, full)
            if full == looked:
                return

    async def _consider(
        self, candidate: Candidate, tally: Tally, limits: dict[Kind, int], full: set[Source]
    ) -> None:
        """Take a candidate, or note which sources are full."""
        if not full.isdisjoint(candidate.sources):
            return
        over = tally.over(limits, candidate)
        if over:
            for kind in (await self._recalled()).lone:
                limits.pop(kind, None)
            over = [source for source in over if source.kind in limits]
        full.update(over)
        if not over:
            tally.take(candidate)

    async def _seen(self, full: frozenset[Source]) -> Sequence[Candidate]:
        if full not in self._looks:
            self._looks[full] = await self._look(full)
        return self._looks[full]

    async def _recalled(self) -> Past:
        if self._past is None:
            self._past = await self._recall()
        return self._past

    def _is_enough(self, tally: Tally, full: set[Source]) -> bool:
        """Return whether an update may be made of these: of enough, or of one that has waited."""
        trained_s = {} if self._past is None else self._past.trained_s
        waited = ages(tally.taken.values(), full, trained_s.get)
        return len(waited) >= self._sizes.groups or any(
            age_s >= self._sizes.max_age_s for age_s in waited
        )
