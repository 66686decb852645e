"""Store episodes, and read what became of them."""

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.claims import Claim
from store.database import driver_of
from store.ids import days_of
from store.read.episodes import read_episodes
from store.records import CallRecord, Episode, SpoolRecord
from store.schema.partitions import ensure_partition
from store.selecting import select_episodes
from store.version_states import ensure_base
from store.write.ingest import Ingester


async def store(engine: AsyncEngine, *records: SpoolRecord) -> None:
    """Store records for a policy `m`, which exists afterwards."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    await Ingester().store(engine, records)


async def ingest(connection: AsyncConnection, records: Sequence[SpoolRecord]) -> None:
    """Store records in the caller's transaction."""
    for day in days_of([record.id for record in records if isinstance(record, CallRecord)]):
        await ensure_partition(connection, day)
    await Ingester()._store_on(await driver_of(connection), records, repeated=True)


async def episodes(engine: AsyncEngine) -> list[Episode]:
    async with engine.connect() as connection:
        return await read_episodes(connection, await select_episodes(connection))


def keys(claim: Claim | None) -> list[str]:
    return [] if claim is None else [e.key for group in claim.groups for e in group.episodes]


async def reasons(engine: AsyncEngine) -> dict[str, str | None]:
    """Return why each consumed episode was not trained on, None for one that was."""
    query = "SELECT key, reason FROM consumptions c JOIN episodes e ON e.id = c.episode_id"
    async with engine.connect() as connection:
        return {row.key: row.reason for row in await connection.execute(text(query))}
