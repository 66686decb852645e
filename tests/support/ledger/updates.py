"""Leave in the ledger what a learner's update leaves, without a learner."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claim_query import ClaimRule
from store.claims import Claim, Outcome
from trainer.updates.plan import Plan


async def claimed(
    engine: AsyncEngine, rule: ClaimRule, parent: int = 0, recipe: Mapping[str, Any] | None = None
) -> Claim | None:
    """Claim what `rule` allows, and read it; None if it allows nothing."""
    async with engine.begin() as connection:
        update_id = await claims.claim(connection, rule, parent, recipe or {})
    if update_id is None:
        return None
    async with engine.connect() as connection:
        return await claims.load_claim(connection, update_id)


def all_trained(claim: Claim) -> list[Outcome]:
    """Report each claimed episode as trained."""
    return [Outcome(episode_id=e.id, trained=True) for g in claim.groups for e in g.episodes]


async def consume_all(
    engine: AsyncEngine,
    claim: Claim,
    metrics: Mapping[str, float] | None = None,
    version: int | None = None,
    baselines: Any = None,
) -> None:
    """Consume what was claimed as trained, into `version` if one is given."""
    async with engine.begin() as connection:
        await claims.record_update(
            connection,
            claim.update_id,
            all_trained(claim),
            metrics or {},
            policy=claim.policy,
            version=version,
            adapter_path=f"/a/{version}" if version else None,
            baselines=baselines,
        )


async def record_update(engine: AsyncEngine, claim: Claim, plan: Plan, version: int = 1) -> None:
    """Consume what was claimed as `plan` says, into `version`."""
    async with engine.begin() as connection:
        await claims.record_update(
            connection,
            claim.update_id,
            plan.outcomes,
            plan.metrics,
            policy="m",
            version=version,
            adapter_path=f"/a/{version}",
            baselines=plan.baselines,
        )
