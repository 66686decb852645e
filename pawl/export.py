"""Write JSON lines (`pawl export`): episodes, oldest first, or what their evaluation came to."""

from datetime import UTC, datetime
from typing import IO
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import Damaged
from store.read.browsing import fates_of
from store.read.episodes import read_in_batches
from store.read.evaluations import evaluations
from store.read.lines import encoded_line
from store.selecting import Selection, selected
from store.version_queries import list_versions


async def export(engine: AsyncEngine, selection: Selection, out: IO[bytes]) -> int:
    """Write the selected episodes to `out`, and return their number.

    Raises:
        Damaged: some episodes cannot be read back. The message names each with its reason;
            all others are written.
    """
    now = datetime.now(UTC)
    count = 0
    damaged: dict[UUID, str] = {}
    async with engine.connect() as connection:
        ids = await selected(connection, selection)
        async for batch in read_in_batches(connection, ids):
            damaged |= batch.damaged
            fates = await fates_of(connection, [episode.id for episode in batch.episodes])
            for episode in batch.episodes:
                try:
                    line = encoded_line(episode, now, fates=fates.get(episode.id, ()))
                except Damaged as error:
                    damaged[episode.id] = str(error)
                    continue
                out.write(line + b"\n")
                count += 1
    if damaged:
        reasons = "\n".join(damaged.values())
        raise Damaged(f"{reasons}; the other {count} episodes are written", damaged)
    return count


async def export_curve(engine: AsyncEngine, selection: Selection, out: IO[bytes]) -> int:
    """Write the evaluation of each version, of the selected policies, and return their number."""
    async with engine.connect() as connection:
        curve = await evaluations(connection, selection.policy)
        if selection.tenant is not None:
            own = {v.name for v in await list_versions(connection) if v.tenant == selection.tenant}
            curve = [point for point in curve if point.policy in own]
    for point in curve:
        out.write(msgspec.json.encode(point) + b"\n")
    return len(curve)
