"""Refuse to consume what turned out to be evaluation after an update had claimed it."""

from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import TurnedEvaluation
from store.records import EVAL
from store.schema.recorded import SPLIT

# How many of these episodes a message names.
TOLD: Final = 5
# Locked in the order of keys, as everywhere, until the caller's transaction ends.
_HELD: Final = text(
    f"SELECT key, {SPLIT} AS split FROM episodes"
    " WHERE id IN (SELECT episode_id FROM episode_policies WHERE claimed_by = :update_id)"
    " ORDER BY key FOR NO KEY UPDATE"
)


async def refuse_evaluation(connection: AsyncConnection, update_id: UUID) -> None:
    """Lock the episodes that an update holds: none becomes evaluation before they are spent.

    Raises:
        TurnedEvaluation: a call said since the claim that one of them is evaluation.
    """
    held = await connection.execute(_HELD, {"update_id": update_id})
    turned = [row.key for row in held if row.split == EVAL]
    if turned:
        named = ", ".join(map(repr, turned[:TOLD]))
        raise TurnedEvaluation(
            f"a call said that {len(turned)} of its episodes are evaluation after update"
            f" {update_id} had claimed them ({named}): release the update, and claim again"
        )
