"""End updates and consume episodes: each update ends once, each policy consumes an episode once.

All that consumes episodes does it here: a finished update, one that sets unusable episodes aside,
and one that only expires episodes (`claims`, `damage`, `expiry`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import ClaimLost
from store.schema.trained import updates

# The policy is the update's. The foreign key locks what it may claim of each episode, in the order
# of `ids`, until the transaction ends.
_CONSUME: Final = text(
    """
    INSERT INTO consumptions (episode_id, policy, update_id, trained, reason)
    SELECT e.id, u.policy, u.id, e.trained, e.reason
    FROM updates u,
        unnest(CAST(:ids AS uuid[]), CAST(:trained AS boolean[]), CAST(:reasons AS text[]))
            WITH ORDINALITY AS e (id, trained, reason, place)
    WHERE u.id = :update_id ORDER BY e.place
    """
)


async def consume_episodes(
    connection: AsyncConnection,
    update_id: UUID,
    episodes: Iterable[tuple[UUID, bool, str | None]],
) -> None:
    """Consume episodes for an update's policy, in the caller's transaction and the given order.

    Args:
        connection: an open transaction.
        update_id: the update that consumes them.
        episodes: for each its id, whether it was trained, and the reason if it was not.

    Raises:
        sqlalchemy.exc.IntegrityError: the policy has consumed an episode already, or never had a
            call of it, or a reason is missing.
    """
    rows = list(episodes)
    values = {
        "update_id": update_id,
        "ids": [episode for episode, _, _ in rows],
        "trained": [trained for _, trained, _ in rows],
        "reasons": [reason for _, _, reason in rows],
    }
    await connection.execute(_CONSUME, values)


async def end_update(
    connection: AsyncConnection,
    update_id: UUID,
    state: str,
    metrics: Mapping[str, Any],
    **columns: Any,
) -> None:
    """Move a running update to its last `state`, with its figures and other `columns`.

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
    """
    ended = await connection.execute(
        update(updates)
        .where(updates.c.id == update_id, updates.c.state == "running")
        .values(state=state, metrics=dict(metrics), finished_at=text("now()"), **columns)
        .returning(updates.c.id)
    )
    if ended.first() is None:
        raise ClaimLost(f"update {update_id} is no longer running")
