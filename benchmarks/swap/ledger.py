"""Read the ledger of a run: which version answered which call, and what was retired when."""

import asyncio
import time
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Final

from sqlalchemy import ARRAY, Text, bindparam, text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.swap.records import Stored

STORED_S: Final = 120.0
LOOK_S: Final = 0.5
# By their ids: calls from before the clients began are stored as well, and are not asked for.
_COUNT: Final = text("SELECT count(*) FROM transitions WHERE id::text = ANY(:ids)").bindparams(
    bindparam("ids", type_=ARRAY(Text))
)
_CALLS: Final = text(
    """
    SELECT t.id, e.key, t.policy_version, t.started_at
    FROM transitions t JOIN episodes e ON e.id = t.episode_id
    ORDER BY t.started_at, t.id
    """
)
_RETIRED: Final = text(
    "SELECT version, min(at) AS at FROM policy_events WHERE to_state = 'retired' GROUP BY version"
)


async def read_ledger(
    engine: AsyncEngine, calls: Collection[str]
) -> tuple[list[Stored], Mapping[int, datetime]]:
    """Wait until the calls of these ids are stored, or for two minutes; return all calls.

    They come oldest first, and with them when each version was retired that was.
    """
    deadline = time.monotonic() + STORED_S
    async with engine.connect() as connection:
        asked = {"ids": list(calls)}
        while (await connection.scalar(_COUNT, asked) or 0) < len(calls):
            if time.monotonic() > deadline:
                break
            await connection.rollback()
            await asyncio.sleep(LOOK_S)
        stored = [
            Stored(
                id=str(row.id), episode=row.key, version=row.policy_version or 0, at=row.started_at
            )
            for row in await connection.execute(_CALLS)
        ]
        retired = {row.version: row.at for row in await connection.execute(_RETIRED)}
    return stored, retired
