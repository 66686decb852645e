"""Consume episodes that can never be trained any more; count those that wait, and for what."""

from time import perf_counter
from typing import Any, Final, get_args

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.link.scores import lacking
from store.updates import expiry
from store.updates.ready import ClaimRule
from store.values.rewards import Lack
from trainer.metrics import EPISODES, LACKING

log = structlog.get_logger()

# Seconds between checks while the same version serves.
EXPIRE_S: Final = 60.0


class Expiring:
    """Consume expired episodes for each new version, and once every `EXPIRE_S` seconds."""

    def __init__(self, engine: AsyncEngine, rule: ClaimRule, recipe: dict[str, Any]) -> None:
        """Store the claim rule, and the recipe (as JSON) that sweeps are recorded with."""
        self._engine = engine
        self._rule = rule
        self._recipe = recipe
        self._last_look: tuple[int, float] | None = None

    async def expire(self, parent: int) -> None:
        """Consume the episodes that are past the rule's limits for an update of version `parent`.

        Those that wait for what their reward lacks are counted.

        Nothing is done within `EXPIRE_S` seconds of the last time, unless `parent` has changed.
        """
        if self._last_look is not None:
            version, at = self._last_look
            if version == parent and perf_counter() < at + EXPIRE_S:
                return
        while await self._spend(parent) == expiry.MOST:
            pass
        await self._count_lacking()
        self._last_look = parent, perf_counter()

    async def _count_lacking(self) -> None:
        async with self._engine.connect() as connection:
            lacks = await lacking(connection, self._rule.policy)
        for reason in get_args(Lack):
            LACKING.labels(self._rule.policy, reason).set(lacks.get(reason, 0))

    async def _spend(self, parent: int) -> int:
        async with self._engine.begin() as connection:
            spent = await expiry.expire(connection, self._rule, parent, self._recipe)
        for reason, count in spent.items():
            EPISODES.labels(self._rule.policy, reason).inc(count)
        if spent:
            log.warning("episodes_expired", **spent)
        return sum(spent.values())
