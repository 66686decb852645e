"""Claim the episodes of an update, and set aside those that cannot be used."""

from collections.abc import Mapping
from time import monotonic
from typing import Any, Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import Damaged
from store.updates import claims
from store.updates.claims import Claim
from store.updates.damage import DAMAGED, set_aside
from store.updates.ready import ClaimRule
from trainer.errors import Unusable
from trainer.metrics import EPISODES, UPDATES

log = structlog.get_logger()

# After an update that nobody could be blamed for: the pause before the next, twice as long
# each time. The same claim gives the same update, until there are other episodes.
FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0
REMEDY: Final = (
    "no single episode is to blame: look at the model and the machine (weights that are not"
    " finite, dtype float16) and at the recipe (learning rate, normalisation)"
)


class Claiming:
    """Claim the episodes of one update after the other."""

    def __init__(self, engine: AsyncEngine, rule: ClaimRule, recipe: dict[str, Any]) -> None:
        """Store the claim rule, and the recipe (as JSON) that each update is recorded with."""
        self._engine = engine
        self._rule = rule
        self._recipe = recipe
        self._given_back = 0
        self._not_before = 0.0

    async def take(self, parent: int) -> Claim | None:
        """Claim the episodes of an update of version `parent`, or return None if too few are ready.

        If some of a claim cannot be read back, they are set aside and the claim is made anew: a
        group that lost a member is then as short as any other short group, and waits. Return None,
        too, for a while after an update that nobody could be blamed for (`undo`).

        Raises:
            ClaimLost: another update of the policy is running.
        """
        while monotonic() >= self._not_before:
            async with self._engine.begin() as connection:
                update_id = await claims.claim(connection, self._rule, parent, self._recipe)
            if update_id is None:
                return None
            try:
                async with self._engine.connect() as connection:
                    return await claims.load_claim(connection, update_id)
            except Damaged as error:
                await self._set_aside(update_id, error.episodes, DAMAGED, str(error))
        return None

    async def undo(self, update_id: UUID, why: Unusable) -> None:
        """End an update that cannot be computed: who is to blame is spent, all others are free.

        Raises:
            ClaimLost: the update is no longer running.
        """
        UPDATES.labels(self._rule.policy, "released").inc()
        if why.episodes:
            await self._set_aside(update_id, why.episodes, why.reason, str(why))
        else:
            await self._give_back(update_id, str(why))

    def forget_failures(self) -> None:
        """Forget earlier updates that were given back: the next pause is the shortest again."""
        self._given_back = 0

    async def _give_back(self, update_id: UUID, why: str) -> None:
        async with self._engine.begin() as connection:
            freed = await claims.release(connection, update_id, why)
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self._given_back)
        self._given_back += 1
        self._not_before = monotonic() + pause
        log.error(
            "update_released",
            update=str(update_id),
            episodes_freed=freed,
            reason=why,
            remedy=REMEDY,
            again_in_s=pause,
        )

    async def _set_aside(
        self, update_id: UUID, episodes: Mapping[UUID, str], reason: str, why: str
    ) -> None:
        async with self._engine.begin() as connection:
            spent = await set_aside(connection, update_id, episodes, reason)
        EPISODES.labels(self._rule.policy, reason).inc(spent)
        log.error(f"episodes_{reason}", update=str(update_id), episodes=spent, reason=why)
