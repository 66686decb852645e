"""When episodes that can never be trained any more are looked for, and how that is told."""

from time import perf_counter
from typing import Any, Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.expiry import MOST, expire
from store.ready import ClaimRule
from trainer.metrics import EPISODES

log = structlog.get_logger()

# Between looks while the same version serves.
EXPIRE_S: Final = 60.0


class Expiring:
    """Spends them for each new version, and now and then."""

    def __init__(self, engine: AsyncEngine, rule: ClaimRule, recipe: dict[str, Any]) -> None:
        self._engine = engine
        self._rule = rule
        self._recipe = recipe
        self._looked: tuple[int, float] | None = None

    async def look(self, parent: int) -> None:
        """Spend what is past the rule's limits where `parent` is trained on."""
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
