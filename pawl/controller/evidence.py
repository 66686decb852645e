"""Read the episodes that a comparison rests on: each once, in the order of their first calls.

What was read is kept, so that a look costs what is new since the last one. Another controller, or
one that is started again, begins at the beginning and comes to the same: of an episode counts what
there was of it a fixed time after it began, whenever it is read.
"""

import asyncio
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.controller.comparison import Comparison, Episode
from store.read.gates import arm_episodes
from store.records import Arm
from trainer.publishing.publisher import PROXY_REFRESH_S
from trainer.recipes.recipe import PublishOptions

# Episodes are read in parts of this length, and of so many: none takes long, or much memory.
PART: Final = timedelta(hours=1)
MOST: Final = 5_000
# All proxies know of a change after this long.
KNOWN: Final = timedelta(seconds=PROXY_REFRESH_S)
# What a proxy recorded is in the database after this long, unless that is away.
STORED: Final = timedelta(seconds=5)
# A look reads on for so long, and leaves the rest to the next looks: other policies wait for it.
READ_S: Final = 5.0


class Evidence:
    """Feed a comparison with the live episodes of two arms.

    Attributes:
        key: what is compared: with another key another evidence begins.
        comparison: what was read so far.
        newest: the newest of the new versions of which an episode was read.
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
        self.newest = 0
        self._policy = policy
        self._delay = timedelta(seconds=rule.reward_delay_s)
        self._new = new
        self._goes_on_from: UUID | None = None
        self._at = since + KNOWN

    async def catch_up(
        self, connection: AsyncConnection, given: Mapping[Arm, Collection[int]], now: datetime
    ) -> bool:
        """Read the episodes that count by `now` and are not read yet; return whether none is left.

        `given` are the versions of both arms. It leaves off after READ_S, after a part at least.
        """
        until, clock = now - self._delay - STORED, asyncio.get_running_loop().time
        stop_at = clock() + READ_S
        while self._at < until:
            end = min(self._at + PART, until)
            episodes, self._goes_on_from = await arm_episodes(
                connection,
                self._policy,
                given,
                since=self._goes_on_from or self._at,
                until=end,
                counts=self._delay,
                most=MOST,
            )
            for one in episodes:
                if one.arm == self._new and one.version > self.newest:
                    if self.newest:
                        self.comparison.mark()
                    self.newest = one.version
                read = {name: getattr(one, name) for name in Episode.__struct_fields__}
                self.comparison.add(one.arm == self._new, Episode(**read))
            if self._goes_on_from is None:
                self._at = end
            if self._at < until and clock() >= stop_at:
                return False
        return True
