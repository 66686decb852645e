"""Set aside the unusable episodes of a claim, and free the others.

An episode that is damaged, or makes an update's gradient infinite, would be claimed again and stop
the trainer each time. So the update that finds it consumes it with its reason, and ends in state
`expired`. A member that an earlier update consumed is only marked, so that no later return is
compared with it.
"""

from collections.abc import Mapping
from typing import Final
from uuid import UUID

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema.recorded import episodes
from store.updates.consuming import consume_episodes, end_update

DAMAGED: Final = "damaged"
NON_FINITE: Final = "non_finite"
WHY: Final[Mapping[str, str]] = {
    DAMAGED: "a call of this episode cannot be read back",
    NON_FINITE: "the loss or gradient of this episode is not finite",
}


async def set_aside(
    connection: AsyncConnection,
    update_id: UUID,
    damaged: Mapping[UUID, str],
    reason: str = DAMAGED,
) -> int:
    """End a running update whose claim has unusable episodes; return how many were consumed.

    Args:
        connection: an open transaction.
        update_id: the running update.
        damaged: what is wrong with each unusable episode, by episode id.
        reason: the reason recorded with their consumption, a key of `WHY`.

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
    """
    held = await _held(connection, update_id, damaged)
    metrics = {
        "episodes": len(held),
        "trained_episodes": 0,
        "dropped": {reason: len(held)} if held else {},
        reason: {str(one): why for one, why in damaged.items()},
    }
    await end_update(connection, update_id, "expired" if held else "abandoned", metrics)
    await consume_episodes(connection, update_id, [(one, False, reason) for one in held])
    await connection.execute(
        update(episodes).where(episodes.c.id.in_(damaged)).values(quarantined_reason=WHY[reason])
    )
    await connection.execute(
        update(episodes)
        .where(episodes.c.claimed_by == update_id, episodes.c.id.not_in(held))
        .values(claimed_by=None)
    )
    return len(held)


async def _held(
    connection: AsyncConnection, update_id: UUID, damaged: Mapping[UUID, str]
) -> list[UUID]:
    """Return the members of `damaged` that the update claimed; lock all rows that will change."""
    query = (
        select(episodes.c.id, episodes.c.claimed_by)
        .where(or_(episodes.c.claimed_by == update_id, episodes.c.id.in_(damaged)))
        .order_by(episodes.c.key)
        .with_for_update(key_share=True)
    )
    rows = await connection.execute(query)
    return [row.id for row in rows if row.claimed_by == update_id and row.id in damaged]
