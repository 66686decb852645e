"""Create the day partitions of `transitions`, each when the first call of its day is stored."""

from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at


def partition_name(day: date) -> str:
    """Return the name of a day's partition, such as `transitions_20261120`."""
    return f"transitions_{day:%Y%m%d}"


def day_bounds(day: date) -> tuple[UUID, UUID]:
    """Return the half-open range of UUIDv7s made on `day` (UTC)."""
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return lowest_id_at(start), lowest_id_at(start + timedelta(days=1))


async def ensure_partition(connection: AsyncConnection, day: date) -> None:
    """Create the partition of `day` unless it exists. Several drainers may call it at once."""
    low, high = day_bounds(day)
    name = partition_name(day)
    if await _exists(connection, name):
        return
    await connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": name})
    if await _exists(connection, name):
        return
    # CREATE TABLE … PARTITION OF would lock the parent table and so wait for all readers of any
    # day. ATTACH PARTITION takes a weaker lock.
    await connection.exec_driver_sql(
        f"CREATE TABLE {name} (LIKE transitions INCLUDING CONSTRAINTS INCLUDING STORAGE)"
    )
    await connection.exec_driver_sql(
        f"ALTER TABLE transitions ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')"
    )


async def _exists(connection: AsyncConnection, name: str) -> bool:
    # Not `to_regclass`: its answer may be outdated, as old as this connection's last table lock.
    query = text(
        "SELECT EXISTS (SELECT FROM pg_class WHERE relname = :name AND pg_table_is_visible(oid))"
    )
    return bool(await connection.scalar(query, {"name": name}))
