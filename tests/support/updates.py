"""What a learner's update leaves in the ledger, without a learner."""

from sqlalchemy.ext.asyncio import AsyncEngine

from store.updates import claims
from store.updates.claims import Claim
from trainer.updates.plan import Plan


async def record_update(engine: AsyncEngine, claim: Claim, plan: Plan, version: int = 1) -> None:
    """Consume what was claimed as `plan` says, into `version`."""
    async with engine.begin() as connection:
        await claims.consume(
            connection,
            claim.update_id,
            plan.outcomes,
            plan.metrics,
            policy="m",
            version=version,
            adapter_path=f"/a/{version}",
            baselines=plan.baselines,
        )
