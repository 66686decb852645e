"""How much signal waits for a policy: what whose turn it is depends on."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema.claimable import FREE
from store.updates.ready import ClaimRule

# Whole groups alone: what is left over of a task waits for more members, or for its age.
_GROUPS: Final = text(
    f"""
    SELECT coalesce(sum(members / :group_size), 0) FROM (
        SELECT count(*) AS members FROM episode_policies
        WHERE policy = :policy AND {FREE} AND (task IS NOT NULL OR :group_size = 1)
            AND (scored_at IS NOT NULL OR (:calls_are_paid AND call_scored_at IS NOT NULL))
        GROUP BY task) counted
    """
)


async def waiting_updates(connection: AsyncConnection, rule: ClaimRule) -> float:
    """Return how many updates under `rule` could be made of the whole groups that wait."""
    values = {
        "policy": rule.policy,
        "group_size": rule.group_size,
        "calls_are_paid": rule.call_rewards_after_s is not None,
    }
    return int((await connection.execute(_GROUPS, values)).scalar_one()) / rule.groups
