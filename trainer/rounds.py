"""Give the policies of one trainer their turns: one update at a time, by waiting signal."""

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.updates import claims
from trainer.errors import FilesUnread
from trainer.trainee import Trainee
from trainer.turns import Waiting, in_turn

# The pause after a check of the store is at least this many times as long as the check, so
# that a large backlog does not keep the database busy.
PAUSE_PER_CHECK: Final = 10


class Rounds:
    """Run updates of policies that share a trainer, for as long as one database connection lives.

    `guard` is the connection that holds the policies.
    """

    def __init__(
        self, trainees: Sequence[Trainee], guard: AsyncConnection, engine: AsyncEngine
    ) -> None:
        """Begin with no policy held."""
        self._trainees = {one.policy: one for one in trainees}
        self._guard = guard
        self._engine = engine
        for one in trainees:
            one.lost()

    async def run(self, poll_s: float, *, once: bool) -> None:
        """Run one update after the other; return after the first with `once`.

        Raises:
            Exception: what the last of the policies failed of that could still be worked on; not
                where files of one could not be read, which may pass.
        """
        while True:
            await claims.still_connected(self._guard)
            held = await self._take_up()
            # Beginning with a policy takes long, and is no check of the store.
            started = perf_counter()
            updated = await self._turn(held)
            if updated and once:
                return
            if not updated:
                check_s = perf_counter() - started
                await asyncio.sleep(max(poll_s, PAUSE_PER_CHECK * check_s))

    async def _take_up(self) -> list[Trainee]:
        """Hold the policies that can be worked on, and return them."""
        return [
            one for one in self._trainees.values() if await one.take_up(self._guard, self._engine)
        ]

    async def _turn(self, held: Sequence[Trainee]) -> bool:
        """Run one update, of the first in turn that has enough for one; return if any had."""
        waiting, alone = [], len(self._trainees) == 1
        for one in held:
            signal = await one.waiting(self._guard, alone=alone)
            if signal is not None:
                waiting.append(Waiting(policy=one.policy, updates=signal, turns=one.turns))
        for name in in_turn(waiting):
            if await self._trainees[name].update_once(self._guard):
                for one in self._trainees.values():
                    one.turns = 0 if one.policy == name else one.turns + 1
                return True
        self._stop_if_all_failed()
        return False

    def _stop_if_all_failed(self) -> None:
        failures = [one.failure for one in self._trainees.values()]
        last = failures[-1]
        if last is not None and not any(why is None or _passes(why) for why in failures):
            raise last


def _passes(why: Exception) -> bool:
    """Return whether a failure may end without anybody doing something."""
    return isinstance(why, FilesUnread)
