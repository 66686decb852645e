"""Read the episodes of a comparison: each once, in the order in which they count.

A look reads only what is new since the last one. Another controller, or a restarted one, reads from
the beginning and gets the same result: when an episode counts, and its data that count, do not
depend on when it is read.
"""

import asyncio
from collections.abc import Container, Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from controller.comparison import ComparedEpisode, Comparison
from controller.own_past import PAST
from controller.replicas import PROXY_REFRESH_S
from store.ids import lowest_id_at, time_of
from store.read.gates import (
    CLOCK_SKEW,
    ArmEpisode,
    arm_episodes,
    begun_episodes,
    episodes_per_hour,
)
from store.records import Arm
from trainer.recipes.recipe import PublishOptions

# Episodes are read span by span, with about EPISODES_PER_SPAN in each, to bound time and memory. A
# span lasts SHORTEST_SPAN to LONGEST_SPAN.
EPISODES_PER_SPAN: Final = 2_000
SHORTEST_SPAN, LONGEST_SPAN = timedelta(minutes=15), timedelta(days=1)
MAX_EPISODES: Final = 5_000
# A call's record is looked for this long after the call began: it is stored once the call ends.
LONGEST_CALL: Final = timedelta(hours=1)
# Longest past that the serving arm's rewards are compared with.
LONGEST_PAST: Final = timedelta(days=7)
# Episodes that began within this time of a change may still be of the earlier versions.
PROXIES_KNOW_AFTER: Final = timedelta(seconds=PROXY_REFRESH_S)
# Records of a proxy are in the database after this long, unless the database is away.
STORED_AFTER: Final = timedelta(seconds=5)
# A look stops reading after this long, as other policies wait; the next looks go on.
READ_S: Final = 5.0


# The compared versions of each arm. Episodes of an arm with other versions are left out: the
# serving version was once a canary, and a proxy may still treat it as one.
ArmVersions = Mapping[Arm | None, Container[int | None]]


class Evidence:
    """Feed a comparison with the live episodes of two arms.

    Attributes:
        key: identifies what is compared; another key needs new evidence.
        comparison: the comparison of all episodes read so far.
        is_loss_reported: whether the loss on a family of tasks was reported.
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
        """Compare episodes that begin from `since` on; `new` is the arm of the new version."""
        self.key = key
        self.comparison = comparison
        self.is_loss_reported = False
        self._policy = policy
        self._delay = timedelta(seconds=rule.reward_delay_s)
        # A watch counts an episode once it has a reward. A trial waits the whole delay for episodes
        # that hang in either arm: the new version does not serve yet, and can do no harm.
        self._soon = comparison.is_watch
        self._new = new
        # Rounded like the beginning of an episode, which is read from its id.
        self._since = time_of(lowest_id_at(since))
        # The time read up to (None: nothing is read); the episodes that began by then and do not
        # count yet; and the first calls of those that count.
        self._at: datetime | None = None
        self._span = SHORTEST_SPAN
        self._waiting: dict[UUID, Row[Any]] = {}
        self._counted = set[UUID]()

    async def catch_up(
        self, connection: AsyncConnection, given: ArmVersions, now: datetime
    ) -> bool:
        """Add unread episodes that count by `now` to the comparison; return whether all are read.

        `given` has the versions of each arm. Reads at least one time span, and stops after READ_S.
        """
        until, clock = now - CLOCK_SKEW - STORED_AFTER, asyncio.get_running_loop().time
        stop_at = clock() + READ_S
        if self._at is None:
            an_hour = max(await episodes_per_hour(connection, self._policy), 1.0)
            self._span = min(
                max(timedelta(hours=EPISODES_PER_SPAN / an_hour), SHORTEST_SPAN), LONGEST_SPAN
            )
            # Twice the time in which PAST episodes are expected.
            past = min(timedelta(hours=2 * PAST / an_hour), LONGEST_PAST)
            self._at = self._since - past * self.comparison.is_watch
        while self._at < until:
            end = min(self._at + self._span, until)
            await self._read_begun(connection, end)
            waiting = self._waiting.values()
            for one in await arm_episodes(
                connection, self._policy, waiting, until=end, within=self._delay, soon=self._soon
            ):
                self._counted.add(self._waiting.pop(one.id).first_call_id)
                self._add_episode(one, given)
            self._at = end
            if self._at < until and clock() >= stop_at:
                return False
        return True

    async def _read_begun(self, connection: AsyncConnection, end: datetime) -> None:
        """Add to `_waiting` the episodes that began before `end` and were not read yet."""
        assert self._at is not None
        first = lowest_id_at(self._at - min(self._delay, LONGEST_CALL) - STORED_AFTER)
        self._counted = {one for one in self._counted if one >= first}
        while True:
            begun = await begun_episodes(connection, self._policy, first, end, MAX_EPISODES)
            self._waiting |= {
                one.id: one for one in begun if one.first_call_id not in self._counted
            }
            if len(begun) < MAX_EPISODES:
                return
            first = UUID(int=begun[-1].first_call_id.int + 1)

    def _add_episode(self, one: ArmEpisode, given: ArmVersions) -> None:
        read = {name: getattr(one, name) for name in ComparedEpisode.__struct_fields__}
        if one.began < self._since:
            if one.arm == self._new:
                self.comparison.add_past(ComparedEpisode(**read))
        elif (
            one.version in given.get(one.arm, ()) and one.began >= self._since + PROXIES_KNOW_AFTER
        ):
            self.comparison.add(one.arm == self._new, ComparedEpisode(**read))
