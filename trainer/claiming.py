"""Claims the episodes of an update, and sets aside those that cannot be read back."""

from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claims import Claim
from store.damage import DAMAGED, set_aside
from store.errors import Damaged
from store.ready import ClaimRule
from trainer.metrics import EPISODES

log = structlog.get_logger()


class Claiming:
    """Claims the episodes of one update after the other."""

    def __init__(self, engine: AsyncEngine, rule: ClaimRule, recipe: dict[str, Any]) -> None:
        """Store the claim rule, and the recipe (as JSON) that each update is recorded with."""
        self._engine = engine
        self._rule = rule
        self._recipe = recipe

    async def take(self, parent: int) -> Claim | None:
        """Claim the episodes of an update of version `parent`, or return None if too few are ready.

        If some of a claim cannot be read back, they are set aside and the claim is made anew: a
        group that lost a member is then as short as any other short group, and waits.

        Raises:
            ClaimLost: another update of the policy is running.
        """
        while True:
            async with self._engine.begin() as connection:
                update_id = await claims.claim(connection, self._rule, parent, self._recipe)
            if update_id is None:
                return None
            try:
                async with self._engine.connect() as connection:
                    return await claims.load_claim(connection, update_id)
            except Damaged as error:
                async with self._engine.begin() as connection:
                    spent = await set_aside(connection, update_id, error.episodes)
                EPISODES.labels(self._rule.policy, DAMAGED).inc(spent)
                log.error("episodes_damaged", update=str(update_id), reason=str(error))
