"""Read the claims of past updates for a rebuild, and the updates that rebuilt them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.read.past import claim_at
from store.rebuilding.line import PastRow
from store.records import Record
from store.schema.trained import updates
from store.updates.claims import Claim, load_claim


class PastClaim(Record, frozen=True, kw_only=True):
    """Hold a past update's claim without what is left out, its recipe, figures and limits."""

    claim: Claim
    recipe: Mapping[str, Any]
    metrics: Mapping[str, Any]
    limits: Mapping[str, int]


async def past_claim(
    connection: AsyncConnection, source: UUID, left_out: Collection[UUID]
) -> PastClaim:
    """Read the claim of update `source` as of its time, without the episodes that are left out.

    Its groups are filled up as they would have been without these. Its moving baselines are None:
    they are those of the new line.

    Raises:
        Damaged: a call cannot be read back.
    """
    row: Row[Any] = (await connection.execute(select(updates).where(updates.c.id == source))).one()
    claim = await load_claim(connection, source, without=left_out)
    return PastClaim(
        claim=claim_at(claim, row.claimed_at, baselines=None),
        recipe=row.recipe,
        metrics=row.metrics,
        limits={"group_size": row.group_size, "oldest_version": row.oldest_version},
    )


async def baselines_after(
    connection: AsyncConnection, rows: Sequence[PastRow]
) -> Mapping[str, Any] | None:
    """Return the moving baselines that these updates, one after the other, have come to."""
    last = next((row.id for row in reversed(rows) if row.has_baselines), None)
    query = select(updates.c.baselines).where(updates.c.id == last)
    baselines: Mapping[str, Any] | None = (await connection.execute(query)).scalar()
    return baselines
