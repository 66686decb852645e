"""Make ids as UUIDv7 (RFC 9562, section 5.7), which sort by the time they were made."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Final
from uuid import UUID

import uuid_utils

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND: Final = timedelta(milliseconds=1)


def new_id() -> UUID:
    return UUID(int=uuid_utils.uuid7().int)


def new_id_with_text() -> tuple[bytes, str]:
    """Make a new UUIDv7 as bytes and as text, in a fifth of the time that a `UUID` takes."""
    made = uuid_utils.uuid7()
    return made.bytes, str(made)


def lowest_id_at(moment: datetime) -> UUID:
    """Return the lower bound of UUIDv7s made at `moment` or later (ms resolution)."""
    return UUID(int=((moment - EPOCH) // MILLISECOND) << 80)


def time_of(identifier: UUID) -> datetime:
    """Return the time at which a UUIDv7 was made (UTC, ms resolution)."""
    return EPOCH + (identifier.int >> 80) * MILLISECOND


def day_of(identifier: UUID) -> int:
    """Return the day (UTC) on which a UUIDv7 was made, in days since 1970-01-01."""
    return (identifier.int >> 80) // 86_400_000


def days_of(identifiers: Iterable[UUID]) -> list[date]:
    """Return the days (UTC) on which UUIDv7s were made, sorted, each once."""
    days = sorted({day_of(identifier) for identifier in identifiers})
    return [EPOCH.date() + timedelta(days=day) for day in days]
