"""Leave episodes out of a policy's rebuilds, for good.

Those that the policy has consumed stay consumed by the update that did, with the reason `left_out`
beside the fact that it trained them: the past stays what it was, and no later update is compared
with them. Those that wait are consumed, so that none is ever claimed.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final
from uuid import UUID

from sqlalchemy import insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import new_id
from store.schema.claimable import episode_policies
from store.schema.trained import LEFT_OUT, consumptions, updates
from store.updates.consuming import consume_episodes
from store.updates.ready import lock

# Episodes that one statement is about.
MOST: Final = 1000


async def waiting_of(connection: AsyncConnection, policy: str, ids: Collection[UUID]) -> list[UUID]:
    """Return those of the episodes that no update of the policy has claimed."""
    own = episode_policies.c
    query = select(own.episode_id).where(
        own.policy == policy, own.episode_id.in_(ids), own.claimed_by.is_(None)
    )
    return list((await connection.execute(query.order_by(own.episode_id))).scalars())


async def leave_out(
    connection: AsyncConnection,
    policy: str,
    ids: Collection[UUID],
    parent: int,
    recipe: Mapping[str, Any],
) -> int:
    """Leave episodes out, in the caller's transaction; return how many waited.

    `parent` is the version that serves, and `recipe` the policy's: what consumes those that waited
    is recorded with them, as an update in state `expired`.
    """
    ordered = sorted(ids)
    for start in range(0, len(ordered), MOST):
        some = ordered[start : start + MOST]
        await connection.execute(
            update(consumptions)
            .where(consumptions.c.policy == policy, consumptions.c.episode_id.in_(some))
            .values(reason=LEFT_OUT)
        )
    return await _consume_waiting(connection, policy, ordered, parent, recipe)


async def _consume_waiting(
    connection: AsyncConnection,
    policy: str,
    ids: Collection[UUID],
    parent: int,
    recipe: Mapping[str, Any],
) -> int:
    await lock(connection, await waiting_of(connection, policy, ids))
    # Looked at again: another may have got in while this waited for the locks.
    waiting = await waiting_of(connection, policy, ids)
    if not waiting:
        return 0
    update_id = new_id()
    await connection.execute(
        insert(updates).values(
            id=update_id,
            policy=policy,
            parent_version=parent,
            state="expired",
            recipe=dict(recipe),
            metrics={
                "episodes": len(waiting),
                "trained_episodes": 0,
                "dropped": {LEFT_OUT: len(waiting)},
            },
            finished_at=text("now()"),
        )
    )
    await connection.execute(
        update(episode_policies)
        .where(episode_policies.c.policy == policy, episode_policies.c.episode_id.in_(waiting))
        .values(claimed_by=update_id)
    )
    await consume_episodes(connection, update_id, [(one, False, LEFT_OUT) for one in waiting])
    return len(waiting)
