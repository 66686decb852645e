"""Plan an update with what the learner says of its rows: which can be computed, and are worth it.

A plan of the claim alone is pure (`trainer.updates.plan`); here the versions that sampled the rows
give missing log-probabilities, and the parent tells which episodes it has moved too far from.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from store.updates.claims import Claim
from trainer.recipes.recipe import Recipe
from trainer.updates.holding import looks_like_a_fault
from trainer.updates.plan import Plan, plan_update
from trainer.updates.recomputed import with_logprobs
from trainer.updates.staleness import smallest_in, too_far
from trainer.updates.training import Training

# Is told how many of how many measured episodes are too far off the policy, where so many are that
# a server may be at fault.
Doubt = Callable[[int, int], Awaitable[None]]


class Planning:
    """Plan the updates of one recipe."""

    def __init__(self, training: Training, recipe: Recipe, doubt: Doubt) -> None:
        """Store the learner's steps, the recipe, and what is done about a doubtful server."""
        self._training: Final = training
        self._recipe: Final = recipe
        self._doubt: Final = doubt

    async def plan(self, claim: Claim, parent: int) -> Plan:
        """Plan an update of version `parent`, without the episodes that it is too far from.

        Its rows have all their log-probabilities.

        Raises:
            LearnerError: some rows cannot be computed with, or most were sampled by a server that
                is at fault.
        """
        if self._recipe.kept is not None:
            # Nothing is compared with what sampled the rows.
            return plan_update(claim, self._recipe)
        lost = await self._training.lost_versions(claim)
        unreplayed = await self._training.unreplayed(claim)
        plan = plan_update(claim, self._recipe, lost, unreplayed)
        if not plan.rows:
            return plan
        limits = self._recipe.off_policy
        whole, shares = await self._training.measure(parent, plan.rows, limits.ratio_cap)
        far = too_far(shares, limits.min_effective_sample)
        if looks_like_a_fault(len(far), len(shares)):
            await self._doubt(len(far), len(shares))
        if far:
            plan = plan_update(claim, self._recipe, lost, unreplayed, far)
        logprobs = {row.key: row.sampled_logprobs for row in whole}
        return msgspec.structs.replace(
            plan,
            rows=tuple(with_logprobs(plan.rows, logprobs)),
            metrics=plan.metrics | smallest_in(shares),
        )
