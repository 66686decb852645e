"""Claim the episodes of an update, and set aside those that cannot be used."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.errors import Damaged
from store.updates import claims
from store.updates.choice import find_ready
from store.updates.claims import Claim
from store.updates.damage import DAMAGED, set_aside
from store.updates.expiry import oldest_version
from store.updates.ready import ClaimRule
from trainer.errors import LearnerError, Unusable
from trainer.metrics import EPISODES, UPDATES
from trainer.publishing.pacing import Pacing

log = structlog.get_logger()


class Claiming:
    """Claim the episodes of one update after the other."""

    def __init__(
        self,
        engine: AsyncEngine,
        rule: ClaimRule,
        recipe: dict[str, Any],
        pacing: Pacing | None = None,
    ) -> None:
        """Store the claim rule, the recipe (as JSON) of each update, and what paces them, if any.

        Without `pacing` an update never waits for an adapter slot.
        """
        self._engine = engine
        self._pacing = pacing
        self._rule = rule
        self._recipe = recipe

    async def take(self, parent: int) -> Claim | None:
        """Claim the episodes of an update of version `parent`, or return None if too few are ready.

        Return None, too, while the model server has no adapter slot for what the update would make.
        An update that had to wait for one takes what has waited with it.
        If some of a claim cannot be read back, they are set aside and the claim is made anew: a
        group that lost a member is then as short as any other short group, and waits.

        Raises:
            ClaimLost: another update of the policy is running.
        """
        while True:
            async with self._engine.begin() as connection:
                has_waited = self._pacing is not None and self._pacing.waits
                if self._pacing is not None and not await self._pacing.allows(
                    connection, partial(self._is_enough, connection, parent)
                ):
                    return None
                update_id = await claims.claim(
                    connection, self._rule, parent, self._recipe, takes_most=has_waited
                )
            if update_id is None:
                return None
            try:
                async with self._engine.connect() as connection:
                    return await claims.load_claim(connection, update_id)
            except Damaged as error:
                await self._set_aside(update_id, error.episodes, DAMAGED, {"error": str(error)})

    async def _is_enough(self, connection: AsyncConnection, parent: int) -> bool:
        """Return whether an update of version `parent` could be claimed."""
        rule = self._rule
        oldest = await oldest_version(connection, rule.policy, parent, rule.max_staleness)
        return bool(await find_ready(connection, rule, oldest))

    async def undo(self, update_id: UUID, why: LearnerError) -> None:
        """End an update that cannot be computed: who is to blame is spent, all others are free.

        Raises:
            ClaimLost: the update is no longer running.
        """
        UPDATES.labels(self._rule.policy, "released").inc()
        if isinstance(why, Unusable) and why.episodes:
            metrics = {"error": str(why), **why.metrics}
            await self._set_aside(update_id, why.episodes, why.reason, metrics)
        else:
            await self._give_back(update_id, str(why))

    async def _give_back(self, update_id: UUID, why: str) -> None:
        async with self._engine.begin() as connection:
            freed = await claims.release(connection, update_id, why)
        log.error("update_released", update=str(update_id), episodes_freed=freed, reason=why)

    async def _set_aside(
        self,
        update_id: UUID,
        episodes: Mapping[UUID, str],
        reason: str,
        metrics: Mapping[str, Any],
    ) -> None:
        async with self._engine.begin() as connection:
            spent = await set_aside(connection, update_id, episodes, reason, metrics)
        EPISODES.labels(self._rule.policy, reason).inc(spent)
        log.error(f"episodes_{reason}", update=str(update_id), episodes=spent, **metrics)
