"""Set aside the unusable episodes of a claim, and free the others.

An episode that is damaged, or makes an update's gradient infinite, would be claimed again and stop
the trainer each time. So the update that finds it consumes it with its reason, and ends in state
`expired`. A damaged one is quarantined besides: no policy can read it, and where an earlier update
consumed it, no later return is compared with it. A gradient that is not finite is one policy's own.
"""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from sqlalchemy import literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.link.claimable import refresh
from store.records import TRAIN
from store.schema.claimable import episode_policies
from store.schema.recorded import SPLIT, episodes
from store.updates.consuming import consume_episodes, end_update
from store.updates.ready import lock

DAMAGED: Final = "damaged"
NON_FINITE: Final = "non_finite"
CANNOT_BE_READ: Final = "a call of this episode cannot be read back"


async def set_aside(
    connection: AsyncConnection,
    update_id: UUID,
    damaged: Mapping[UUID, str],
    reason: str = DAMAGED,
    figures: Mapping[str, Any] | None = None,
) -> int:
    """End a running update whose claim has unusable episodes; return how many were consumed.

    Args:
        connection: an open transaction.
        update_id: the running update.
        damaged: what is wrong with each unusable episode, by episode id.
        reason: the reason recorded with their consumption.
        figures: what else the update is recorded with.

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
    """
    held = await _held(connection, update_id, damaged)
    metrics = {
        **(figures or {}),
        "episodes": len(held),
        "trained_episodes": 0,
        "dropped": {reason: len(held)} if held else {},
        reason: {str(one): why for one, why in damaged.items()},
    }
    await end_update(connection, update_id, "expired" if held else "abandoned", metrics)
    await consume_episodes(connection, update_id, [(one, False, reason) for one in held])
    if reason == DAMAGED:
        await connection.execute(
            update(episodes)
            .where(episodes.c.id.in_(damaged))
            .values(quarantined_reason=CANNOT_BE_READ)
        )
        await refresh(connection, damaged)
    await connection.execute(
        update(episode_policies)
        .where(
            episode_policies.c.claimed_by == update_id,
            episode_policies.c.episode_id.not_in(held),
        )
        .values(claimed_by=None)
    )
    return len(held)


async def _held(
    connection: AsyncConnection, update_id: UUID, damaged: Mapping[UUID, str]
) -> list[UUID]:
    """Return the members of `damaged` to consume; lock all rows that will change.

    They are those that the update claimed, but for what turned out to be evaluation meanwhile.
    """
    query = select(episode_policies.c.episode_id).where(episode_policies.c.claimed_by == update_id)
    claimed = set((await connection.execute(query)).scalars())
    await lock(connection, [*claimed, *damaged])
    training = select(episodes.c.id).where(
        episodes.c.id.in_(claimed & damaged.keys()), literal_column(SPLIT) == TRAIN
    )
    held = set((await connection.execute(training)).scalars())
    return [one for one in damaged if one in held]
