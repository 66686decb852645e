"""Consumes episodes that can never be trained any more, and reports them as expired."""

from time import perf_counter
from typing import Any, Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.updates.expiry import MOST, expire
from store.updates.ready import ClaimRule
from trainer.metrics import EPISODES

log = structlog.get_logger()

# Seconds between checks while the same version serves.
EXPIRE_S: Final = 60.0


class Expiring:
    """Consumes expired episodes for each new version, and once every `EXPIRE_S` seconds."""

    def __init__(self, engine: AsyncEngine, rule: ClaimRule, recipe: dict[str, Any]) -> None:
        """Store the claim rule, and the recipe (as JSON) that sweeps are recorded with."""
        self._engine = engine
        self._rule = rule
        self._recipe = recipe
        self._looked: tuple[int, float] | None = None

    async def look(self, parent: int) -> None:
        """Consume the episodes that are past the rule's limits for an update of version `parent`.

        Nothing is done within `EXPIRE_S` seconds of the last time, unless `parent` has changed.
        """
        if self._looked is not None:
            version, at = self._looked
            if version == parent and perf_counter() < at + EXPIRE_S:
                return
        while await self._spend(parent) == MOST:
            pass
        self._looked = parent, perf_counter()

    async def _spend(self, parent: int) -> int:
        async with self._engine.begin() as connection:
            spent = await expire(connection, self._rule, parent, self._recipe)
        for reason, count in spent.items():
            EPISODES.labels(self._rule.policy, reason).inc(count)
        if spent:
            log.warning("episodes_expired", **spent)
        return sum(spent.values())
