"""Count the signal that waits for a policy, on which it depends whose turn it is."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema.claimable import FREE
from store.updates.faults import and_not_aside
from store.updates.ready import ClaimRule
from store.updates.rolled_back import and_not_rolled_back

# Whole groups alone, and where an update waits for spread only those whose rewards differ, or for a
# reward only those with it: what is left over of a task waits for more members, or for its age.
_COUNTS: Final = (
    "COALESCE(reward >= CAST(:least_reward AS double precision),"
    " CAST(:least_reward AS double precision) IS NULL)"
)
_GROUPS: Final = f"""
    SELECT coalesce(sum(members / :group_size), 0) FROM (
        SELECT count(*) FILTER (WHERE :group_size > 1 OR {_COUNTS}) AS members
        FROM episode_policies
        WHERE policy = :policy AND {FREE} AND (task IS NOT NULL OR :group_size = 1)
            AND (scored_at IS NOT NULL OR (:calls_are_paid AND call_scored_at IS NOT NULL))
            {{but}}
        GROUP BY task
        HAVING (NOT CAST(:needs_spread AS boolean) OR min(reward) < max(reward))
            AND bool_or({_COUNTS})) counted
"""


async def waiting_updates(connection: AsyncConnection, rule: ClaimRule) -> float:
    """Return how many updates under `rule` could be made of the whole groups that wait."""
    values = {
        "policy": rule.policy,
        "group_size": rule.group_size,
        "calls_are_paid": rule.call_rewards_after_s is not None,
        "needs_spread": rule.needs_spread and rule.group_size > 1,
        "least_reward": rule.least_reward,
    }
    but = await and_not_aside(connection, rule.policy)
    but += await and_not_rolled_back(connection, rule.policy)
    groups = await connection.scalar(text(_GROUPS.format(but=but)), values)
    return int(groups or 0) / rule.groups


# A count for each of two partial indexes, which hold little more than what is counted.
_WAITING = text(
    f"""
    SELECT policy, sum(episodes) AS episodes FROM (
        SELECT policy, count(*) AS episodes FROM episode_policies
        WHERE scored_at IS NOT NULL AND {FREE} GROUP BY policy
        UNION ALL SELECT policy, count(*) FROM episode_policies
        WHERE call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE} GROUP BY policy) counted
    GROUP BY policy
    """
)


async def waiting_episodes(connection: AsyncConnection) -> dict[str, int]:
    """Return how many episodes with a reward each policy may claim; those without are missing."""
    return {row.policy: int(row.episodes) for row in await connection.execute(_WAITING)}
