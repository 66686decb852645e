"""Keep what versions sampled that were rolled back from being trained on.

A version that lost its gate, or fell behind, may have found a way to a bad reward, and its episodes
would teach that to the next one. So they are never claimed, and consumed untrained as soon as they
can be (`store.updates.expiry`), while those that still run go on with their version.
"""

from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import HoldsRolledBack
from store.schema.claimable import FREE
from store.updates.late_evaluation import TOLD

REASON: Final = "rolled_back"
# How long after it was retired a version may still get episodes that began with another, in
# records that are stored late.
_LATE: Final = "interval '1 hour'"
# An episode has calls of its lowest and its highest version. Whether it has any of one in between,
# which it then left as that was retired, only its calls tell.
_HAS_ONE: Final = """
    EXISTS (
        SELECT FROM policies lost
        WHERE lost.name = :policy AND lost.rolled_back_at IS NOT NULL
            AND lost.version BETWEEN episode_policies.version AND episode_policies.latest
            AND (lost.version IN (episode_policies.version, episode_policies.latest) OR EXISTS (
                SELECT FROM episodes part JOIN transitions t ON t.episode_id = part.id
                WHERE (part.id = episode_policies.episode_id
                        OR part.root = episode_policies.episode_id)
                    AND t.policy = lost.name AND t.policy_version = lost.version)))
"""
_WERE: Final = text(
    "SELECT EXISTS (SELECT FROM policies WHERE name = :policy AND rolled_back_at IS NOT NULL)"
)
# By index those that began with such a version. Those that came to it from an older one can only be
# among the free episodes of all older ones, and are looked for while there may be more of them.
_TO_EXPIRE: Final = text(
    f"""
    SELECT w.episode_id FROM policies lost CROSS JOIN LATERAL (
        SELECT episode_id FROM episode_policies
        WHERE policy = :policy AND {FREE} AND version = lost.version
        ORDER BY episode_id LIMIT :most) w
    WHERE lost.name = :policy AND lost.rolled_back_at IS NOT NULL
    UNION
    SELECT episode_id FROM episode_policies
    WHERE policy = :policy AND {FREE} AND latest > version AND version < (
            SELECT max(lost.version) FROM policies lost
            WHERE lost.name = :policy AND lost.rolled_back_at IS NOT NULL
                AND (lost.state = 'rolled_back' OR lost.changed_at > now() - {_LATE}))
        AND {_HAS_ONE}
    LIMIT :most
    """
)
_HELD: Final = text(
    f"""
    SELECT e.key FROM episode_policies JOIN episodes e ON e.id = episode_policies.episode_id
    WHERE episode_policies.claimed_by = :update_id AND {_HAS_ONE} ORDER BY e.key
    """
)


async def and_not_rolled_back(connection: AsyncConnection, policy: str) -> str:
    """Return what a query of a policy's rows ends with, to leave out what was rolled back.

    The rows are those of `episode_policies` under that name. It is empty for a policy of which
    nothing was rolled back, which costs nothing then.
    """
    were = await connection.scalar(_WERE, {"policy": policy})
    return f" AND NOT {_HAS_ONE}" if were else ""


async def rolled_back_episodes(connection: AsyncConnection, policy: str, most: int) -> list[UUID]:
    """Return up to `most` free episodes with a call of a version that was rolled back."""
    values: dict[str, Any] = {"policy": policy, "most": most}
    if not await connection.scalar(_WERE, values):
        return []
    return list((await connection.execute(_TO_EXPIRE, values)).scalars())


async def refuse_rolled_back(connection: AsyncConnection, policy: str, update_id: UUID) -> None:
    """Check that no version was rolled back since an update claimed what it sampled.

    The caller holds the policy (`store.version_states.lock_policies`), so none is meanwhile.

    Raises:
        HoldsRolledBack: one was.
    """
    values = {"policy": policy, "update_id": update_id}
    held = list((await connection.execute(_HELD, values)).scalars())
    if held:
        named = ", ".join(map(repr, held[:TOLD]))
        raise HoldsRolledBack(
            f"a version that sampled {len(held)} of its episodes was rolled back after update"
            f" {update_id} had claimed them ({named}): release the update, and claim again"
        )
