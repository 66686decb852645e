"""Day partitions of `transitions`, made when the first call of a day is stored."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import day_of, lowest_id_at


def partition_name(day: date) -> str:
    """`transitions_20261120`."""
    return f"transitions_{day:%Y%m%d}"


def day_bounds(day: date) -> tuple[UUID, UUID]:
    """The half-open range of UUIDv7s made on `day` (UTC)."""
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return lowest_id_at(start), lowest_id_at(start + timedelta(days=1))


def days_of(call_ids: Iterable[UUID]) -> list[date]:
    """The days (UTC) on which these ids were made, in order."""
    epoch = date(1970, 1, 1)
    return [epoch + timedelta(days=day) for day in sorted({day_of(call) for call in call_ids})]


async def ensure_partition(connection: AsyncConnection, day: date) -> None:
    """Create the partition of `day` unless it is there. Safe to call from several drainers."""
    low, high = day_bounds(day)
    name = partition_name(day)
    exists = await connection.scalar(text("SELECT to_regclass(:name)"), {"name": name})
    if exists is not None:
        return
    await connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": name})
    await connection.exec_driver_sql(
        f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF transitions "
        f"FOR VALUES FROM ('{low}') TO ('{high}')"
    )
