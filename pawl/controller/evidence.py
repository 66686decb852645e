"""Read the episodes that a comparison rests on: each once, in the order of their first calls.

What was read is kept, so that a look costs what is new since the last one. Another controller, or
one that is started again, begins at the beginning and comes to the same: of an episode counts what
there was of it a fixed time after it began, whenever it is read.
"""

import asyncio
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Final, Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.controller.comparison import Comparison, Episode, Rule
from store.read.gates import MOST, ArmEpisode, arm_episodes
from store.records import Arm
from trainer.publishing.publisher import PROXY_REFRESH_S

# Episodes are read in parts of this length, so that none is too large for memory.
PART: Final = timedelta(hours=1)
# The least part of so many that is read at once: an outage is no reason for shorter ones.
MOST_CUTS: Final = 1024
# All proxies know of a change after this long.
KNOWN: Final = timedelta(seconds=PROXY_REFRESH_S)
# What a proxy recorded is in the database after this long, unless that is away.
STORED: Final = timedelta(seconds=5)
# A look reads on for so long, and leaves the rest to the next looks: other policies wait for it.
READ_S: Final = 5.0

Compared = Literal["trial", "watch"]


def counted_at(rule: Rule, now: datetime) -> datetime:
    """Return the time such that episodes that began before it count at `now`."""
    return now - timedelta(seconds=rule.reward_delay_s) - STORED


class Evidence:
    """Feed a comparison with the live episodes of two arms.

    Attributes:
        key: what is compared: with another key another evidence begins.
        comparison: what was read so far.
        newest: the newest of the new versions of which an episode was read.
        confirms: whether it was read from the beginning to confirm a decision that is due.
    """

    def __init__(
        self,
        policy: str,
        rule: Rule,
        new: tuple[Arm, Collection[int]],
        old: tuple[Arm, Collection[int]],
        since: datetime,
        comparison: Comparison,
        *,
        key: object = None,
        confirms: bool = False,
    ) -> None:
        """Begin with the episodes of `since`; `new` and `old` are arms with their versions."""
        self.key = key
        self.comparison = comparison
        self.newest = 0
        self.confirms = confirms
        self._policy = policy
        self._rule = rule
        self._new = new[0]
        self._given: Mapping[Arm, Collection[int]] = dict((new, old))
        self._goes_on_from: UUID | None = None
        self._cut = 1
        self._at = since + KNOWN

    async def catch_up(self, connection: AsyncConnection, now: datetime) -> bool:
        """Read the episodes that count by `now` and are not read yet; return whether none is left.

        It leaves off after READ_S, after a part at least. If it is ended in the middle of a part,
        the next is half as long, and the one after it as long again: what cannot be read in the
        time of a look would never be.
        """
        until, clock = counted_at(self._rule, now), asyncio.get_running_loop().time
        stop_at = clock() + READ_S
        while self._at < until:
            end = min(self._at + PART, until)
            cut, self._cut = self._cut, min(2 * self._cut, MOST_CUTS)
            part = await arm_episodes(
                connection,
                self._policy,
                self._given,
                since=self._goes_on_from or self._at,
                until=end,
                counts=timedelta(seconds=self._rule.reward_delay_s),
                most=max(MOST // cut, 1),
            )
            self._cut = max(cut // 2, 1)
            for episode in part.episodes:
                if episode.arm == self._new and episode.version > self.newest:
                    self.newest = episode.version
                    self.comparison.mark()
                self.comparison.add(episode.arm == self._new, _episode(episode))
            self._goes_on_from = part.goes_on_from
            if part.goes_on_from is None:
                self._at = end
            if self._at < until and clock() >= stop_at:
                return False
        return True


def _episode(one: ArmEpisode) -> Episode:
    return Episode(
        family=one.family,
        reward=one.reward,
        failed=one.failed,
        malformed=one.malformed,
        seconds=one.seconds,
    )
