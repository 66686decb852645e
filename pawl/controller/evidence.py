"""Read the episodes that a comparison rests on: each once, in the order in which they count.

What was read is kept, so that a look costs what is new since the last one. Another controller, or
one that is started again, begins at the beginning and comes to the same: when an episode counts,
and what of it, does not depend on when it is read.
"""

import asyncio
from collections.abc import Container, Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.controller.comparison import ComparedEpisode, Comparison
from pawl.controller.own_past import PAST
from pawl.controller.replicas import PROXY_REFRESH_S
from store.ids import lowest_id_at, time_of
from store.read.gates import (
    SKEW,
    ArmEpisode,
    arm_episodes,
    begun_episodes,
    episodes_per_hour,
)
from store.records import Arm
from trainer.recipes.recipe import PublishOptions

# Episodes are read in parts of about so many, and so long: none takes long, or much memory.
EACH: Final = 2_000
SHORTEST, LONGEST = timedelta(minutes=15), timedelta(days=1)
MOST: Final = 5_000
# The record of a call is looked for so long after it began: it is stored once the call has ended.
LONGEST_CALL: Final = timedelta(hours=1)
# The past that what serves is compared with is no longer than this.
LONGEST_PAST: Final = timedelta(days=7)
# All proxies know of a change after this long.
KNOWN: Final = timedelta(seconds=PROXY_REFRESH_S)
# What a proxy recorded is in the database after this long, unless that is away.
STORED: Final = timedelta(seconds=5)
# A look reads on for so long, and leaves the rest to the next looks: other policies wait for it.
READ_S: Final = 5.0


# The versions of each arm that is compared. What an arm gave to another is of another time: what
# serves now was once a canary, and a proxy may still take it for one.
Given = Mapping[Arm | None, Container[int | None]]


class Evidence:
    """Feed a comparison with the live episodes of two arms.

    Attributes:
        key: what is compared: with another key another evidence begins.
        comparison: what was read so far.
        is_said: whether it was reported that a family of tasks is lost.
    """

    def __init__(
        self,
        policy: str,
        rule: PublishOptions,
        new: Arm,
        since: datetime,
        comparison: Comparison,
        *,
        key: object = None,
    ) -> None:
        """Begin with the episodes of `since`; `new` is the arm of what is tried."""
        self.key = key
        self.comparison = comparison
        self.is_said = False
        self._policy = policy
        self._delay = timedelta(seconds=rule.reward_delay_s)
        # A trial waits for what hangs in one of its arms; nothing serves yet that could do harm.
        self._soon = comparison.is_watch
        self._new = new
        # As exact as the beginning of an episode is known.
        self._since = time_of(lowest_id_at(since))
        # How far it was read, once that has begun; what has begun by then, and does not count yet;
        # and the first calls of what does.
        self._at: datetime | None = None
        self._part = SHORTEST
        self._waiting: dict[UUID, Row[Any]] = {}
        self._counted = set[UUID]()

    async def catch_up(self, connection: AsyncConnection, given: Given, now: datetime) -> bool:
        """Read the episodes that count by `now` and are not read yet; return whether none is left.

        `given` are the versions of both arms. It leaves off after READ_S, after a part at least.
        """
        until, clock = now - SKEW - STORED, asyncio.get_running_loop().time
        stop_at = clock() + READ_S
        if self._at is None:
            an_hour = max(await episodes_per_hour(connection, self._policy), 1.0)
            self._part = min(max(timedelta(hours=EACH / an_hour), SHORTEST), LONGEST)
            # Twice as long as it should take.
            past = min(timedelta(hours=2 * PAST / an_hour), LONGEST_PAST)
            self._at = self._since - past * self.comparison.is_watch
        while self._at < until:
            end = min(self._at + self._part, until)
            await self._begin(connection, end)
            waiting = self._waiting.values()
            for one in await arm_episodes(
                connection, self._policy, waiting, until=end, within=self._delay, soon=self._soon
            ):
                self._counted.add(self._waiting.pop(one.id).first_call_id)
                self._add(one, given)
            self._at = end
            if self._at < until and clock() >= stop_at:
                return False
        return True

    async def _begin(self, connection: AsyncConnection, end: datetime) -> None:
        """Read what began before `end`, as far as it was not there at the last time."""
        assert self._at is not None
        first = lowest_id_at(self._at - min(self._delay, LONGEST_CALL) - STORED)
        self._counted = {one for one in self._counted if one >= first}
        while True:
            begun = await begun_episodes(connection, self._policy, first, end, MOST)
            self._waiting |= {
                one.id: one for one in begun if one.first_call_id not in self._counted
            }
            if len(begun) < MOST:
                return
            first = UUID(int=begun[-1].first_call_id.int + 1)

    def _add(self, one: ArmEpisode, given: Given) -> None:
        read = {name: getattr(one, name) for name in ComparedEpisode.__struct_fields__}
        if one.began < self._since:
            if one.arm == self._new:
                self.comparison.add_past(ComparedEpisode(**read))
        elif one.version in given.get(one.arm, ()) and one.began >= self._since + KNOWN:
            self.comparison.add(one.arm == self._new, ComparedEpisode(**read))
