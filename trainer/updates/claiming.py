"""Claim the episodes of updates, and consume episodes that can never be trained."""

from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any, Final, get_args
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import claims
from store.claim_query import ClaimRule, lock_ready_episodes
from store.claims import DAMAGED, Claim, end_unusable_claim
from store.errors import Damaged
from store.link.claimable import count_missing_rewards
from store.values.rewards import Lack
from trainer.errors import LearnerError, Unusable
from trainer.metrics import EPISODES, LACKING_REWARD, UPDATES, WARNING
from trainer.publishing.pacing import Pacing
from trainer.recipes.recipe import Recipe
from trainer.updates.training_warnings import TrainingWarning, training_warnings

log = structlog.get_logger()

# An update that had to wait for an adapter slot takes up to this many times `claim.groups`.
MOST_AFTER_WAIT: Final = 4
# Seconds without activity until a failed episode without a reward gets the failed reward.
FAILED_AFTER_S: Final = 60.0
# Seconds between checks for expired episodes while the same version serves.
EXPIRE_S: Final = 60.0


def claim_rule(recipe: Recipe, policy: str) -> ClaimRule:
    """Return the store's claim rule for a recipe and a policy."""
    rule, credit, teacher = recipe.claim, recipe.credit, recipe.teacher
    # The store only compares rewards of episodes, so it cannot see the spread of calls' rewards.
    compares = not credit.pays_single_calls
    # A teacher needs no reward, so silence alone ends an episode.
    fails = teacher is None and recipe.failed_reward is not None
    waits_for_calls = teacher is None and credit.pays_single_calls
    return ClaimRule(
        policy=policy,
        group_size=rule.group_size,
        groups=rule.groups,
        max_age_s=rule.max_age_s,
        max_staleness=rule.max_staleness,
        failed_after_s=FAILED_AFTER_S if fails else None,
        call_rewards_after_s=rule.call_rewards_after_s if waits_for_calls else None,
        needs_spread=credit.compares_episodes and compares,
        failed_reward=recipe.failed_reward,
        most_groups=MOST_AFTER_WAIT * rule.groups,
        least_reward=recipe.imitation_rule.min_reward
        if recipe.imitation_rule is not None and compares
        else None,
        finished_after_s=None if teacher is None else teacher.finished_after_s,
    )


class Claiming:
    """Claim the episodes of one update after the other."""

    def __init__(
        self,
        engine: AsyncEngine,
        rule: ClaimRule,
        recipe: dict[str, Any],
        pacing: Pacing | None = None,
    ) -> None:
        """Store the claim rule, and the recipe (as JSON) that each update records.

        Without `pacing`, updates are claimed even if no adapter slot is free.
        """
        self._engine = engine
        self._pacing = pacing
        self._rule = rule
        self._recipe = recipe
        # Parent version and time of the last check for expired episodes.
        self._last_check: tuple[int, float] | None = None
        self._warned: set[TrainingWarning] = set()

    async def claim_update(self, parent: int, *, parent_serves: bool = False) -> Claim | None:
        """Claim the episodes of an update of version `parent`, or return None if too few are ready.

        With `parent_serves`, the limits are those that apply once `parent` serves, as it will soon.
        Return None, too, while the model server has no adapter slot for the new version. An update
        that had to wait for a slot takes more groups (`MOST_AFTER_WAIT`). If episodes of the claim
        cannot be read back, they are consumed, and the claim is made again without them.

        Raises:
            ClaimLost: another update of the policy is running.
        """
        while True:
            async with self._engine.begin() as connection:
                has_waited = self._pacing is not None and self._pacing.waits
                if self._pacing is not None and not await self._pacing.allows_version(
                    connection, partial(self._can_claim, connection, parent, parent_serves)
                ):
                    return None
                update_id = await claims.claim(
                    connection,
                    self._rule,
                    parent,
                    self._recipe,
                    takes_most=has_waited,
                    parent_serves=parent_serves,
                )
            if update_id is None:
                return None
            try:
                async with self._engine.connect() as connection:
                    return await claims.load_claim(connection, update_id)
            except Damaged as error:
                await self._spend_unusable(
                    update_id, error.episodes, DAMAGED, {"error": str(error)}
                )

    async def _can_claim(
        self, connection: AsyncConnection, parent: int, parent_serves: bool
    ) -> bool:
        """Return whether enough episodes are ready for an update of version `parent`."""
        rule = self._rule
        oldest = await claims.oldest_trainable_version(
            connection, rule.policy, parent, rule.max_staleness, parent_serves=parent_serves
        )
        return bool(await lock_ready_episodes(connection, rule, oldest))

    async def end_failed(self, update_id: UUID, why: LearnerError) -> None:
        """End an update that cannot be computed: consume the episodes to blame, free the others.

        Raises:
            ClaimLost: the update is no longer running.
        """
        UPDATES.labels(self._rule.policy, "released").inc()
        if isinstance(why, Unusable) and why.episodes:
            metrics = {"error": str(why), **why.metrics}
            await self._spend_unusable(update_id, why.episodes, why.reason, metrics)
            return
        async with self._engine.begin() as connection:
            freed = await claims.release(connection, update_id, str(why))
        log.error("update_released", update=str(update_id), episodes_freed=freed, reason=str(why))

    async def _spend_unusable(
        self,
        update_id: UUID,
        episodes: Mapping[UUID, str],
        reason: str,
        metrics: Mapping[str, Any],
    ) -> None:
        async with self._engine.begin() as connection:
            spent = await end_unusable_claim(connection, update_id, episodes, reason, metrics)
        EPISODES.labels(self._rule.policy, reason).inc(spent)
        log.error(f"episodes_{reason}", update=str(update_id), episodes=spent, **metrics)

    async def consume_expired(self, parent: int) -> None:
        """Consume the stale and rolled-back episodes: no update of version `parent` may train them.

        Also set the gauges of episodes that lack a reward and of training warnings, and log each
        new warning. Do nothing within `EXPIRE_S` seconds of the last time, unless `parent` has
        changed.
        """
        if self._last_check is not None:
            version, at = self._last_check
            if version == parent and perf_counter() < at + EXPIRE_S:
                return
        policy, spent = self._rule.policy, claims.MOST_EXPIRED
        while spent == claims.MOST_EXPIRED:
            async with self._engine.begin() as connection:
                by_reason = await claims.expire_episodes(
                    connection, self._rule, parent, self._recipe
                )
            for reason, count in by_reason.items():
                EPISODES.labels(policy, reason).inc(count)
            if by_reason:
                log.warning("episodes_expired", **by_reason)
            spent = sum(by_reason.values())
        async with self._engine.connect() as connection:
            lacks = await count_missing_rewards(connection, policy)
            warnings = await training_warnings(connection, policy)
        for lack in get_args(Lack):
            LACKING_REWARD.labels(policy, lack).set(lacks.get(lack, 0))
        for kind in get_args(TrainingWarning):
            WARNING.labels(policy, kind).set(kind in warnings)
            if kind in warnings and kind not in self._warned:
                log.warning("training_warning", policy=policy, kind=kind, why=str(warnings[kind]))
        self._warned = set(warnings)
        self._last_check = parent, perf_counter()
