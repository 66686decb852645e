"""Identifiers: UUIDv7 (RFC 9562 §5.7), so that ids sort by the time they were made."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import uuid_utils


def new_id() -> UUID:
    """A fresh UUIDv7."""
    return UUID(int=uuid_utils.uuid7().int)


def new_name() -> tuple[bytes, str]:
    """A fresh UUIDv7 as bytes and as text: a fifth of the time where no `UUID` is needed."""
    made = uuid_utils.uuid7()
    return made.bytes, str(made)


def lowest_id_at(moment: datetime) -> UUID:
    """The smallest UUIDv7 of `moment` (ms resolution): a bound for range partitions."""
    milliseconds = round(moment.timestamp() * 1000)
    return UUID(int=milliseconds << 80)


def time_of(identifier: UUID) -> datetime:
    """When a UUIDv7 was made (UTC, ms resolution)."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return epoch + timedelta(milliseconds=identifier.int >> 80)


def day_of(identifier: UUID) -> int:
    """The day (UTC) on which a UUIDv7 was made, counted from 1970."""
    return (identifier.int >> 80) // 86_400_000
