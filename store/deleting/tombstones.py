"""Keep what was deleted from being stored again: its names' tombstones are looked at first.

Whoever stores a batch holds a shared lock from its look to its commit, and whoever deletes holds
the same lock alone. So a batch is stored wholly before a deletion, which then finds all of it, or
wholly after it, and then sees its tombstones (docs/decisions/070-deleting-episodes.md).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from datetime import date
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.deleting.names import (
    Named,
    digests,
    keys_left,
    names_in,
    names_of,
    without_deleted,
)
from store.deleting.statements import forget_unmatched
from store.ids import time_of
from store.records import CallRecord, GapRecord, SpoolRecord
from store.schema.recorded import deleted_names
from store.tenants import tenant_of

# Key of the advisory lock that is held until the transaction ends.
DELETE_LOCK: Final = 0x5041574E

_SHARE: Final = f"SELECT pg_advisory_xact_lock_shared({DELETE_LOCK})"
_PATIENCE: Final = "SET LOCAL idle_in_transaction_session_timeout = '30s'"
_HOLD: Final = f"SELECT pg_advisory_xact_lock({DELETE_LOCK})"
# A statement of its own after the lock's: it sees what was committed while that one waited.
_LAST: Final = """
    SELECT (SELECT max(deletion) FROM deleted_names) AS deletion,
        (SELECT max(day) FROM dropped_days) AS dropped,
        (SELECT json_object_agg(tenant, day)::text FROM outdated_days) AS outdated
"""
_DELETED: Final = "SELECT digest FROM deleted_names WHERE digest = ANY($1)"
# One array: statements have no room for as many parameters as one record may have names.
_KNOWN: Final = text("SELECT digest FROM deleted_names WHERE digest = ANY(CAST(:wanted AS uuid[]))")
_NEXT: Final = "SELECT COALESCE(max(deletion), 0) + 1 FROM deleted_names"
_ADD: Final = """
    INSERT INTO deleted_names (digest, deletion) SELECT unnest($1::uuid[]), $2
    ON CONFLICT DO NOTHING
"""


class Gone(NamedTuple):
    """Hold the last day whose calls were dropped, and each tenant's last outdated day."""

    dropped: date | None
    outdated: Mapping[str, date]

    def has(self, record: SpoolRecord) -> bool:
        """Return whether a record is a call of such a day, or of one before."""
        if not isinstance(record, CallRecord) or not any(self):
            return False
        day, outdated = time_of(record.id).date(), self.outdated.get(tenant_of(record.episode))
        return any(last is not None and day <= last for last in (self.dropped, outdated))


_outdated: Final = msgspec.json.Decoder(dict[str, date])


class Admitted(NamedTuple):
    """Hold what is left of a batch, the ids of what is not, and the number of the last deletion."""

    records: list[SpoolRecord]
    left_out: frozenset[UUID]
    deletion: int


async def admit(driver: Any, records: Sequence[SpoolRecord]) -> Admitted:
    """Leave out what was deleted, in the driver's transaction, until whose end nothing is deleted.

    Calls of days that are outdated are left out as well, and leave a gap. Of a deleted call, the
    names that feedback may have for it become tombstones, too.
    """
    await driver.execute(_SHARE)
    last = await driver.fetchrow(_LAST)
    deletion = last["deletion"] or 0
    gone = Gone(last["dropped"], _outdated.decode(last["outdated"] or "{}"))
    # Where nothing was ever deleted, no record's names need a digest.
    deleted = await _deleted(driver, records) if deletion else set[UUID]()
    if not deleted and not any(gone):
        return Admitted(list(records), frozenset(), deletion)
    names_of_late = [name for call in _late(records, deleted) for name in names_of(call)]
    await add(driver, names_of_late, deletion)
    await forget_unmatched(driver, names_of_late)
    # Feedback about such a call may be in the same batch.
    deleted |= digests(names_of_late)
    # The episode may go on, and misses this call then (`store.write.gaps`).
    gaps = [
        GapRecord(id=record.id, episodes=keys)
        for record in records
        if isinstance(record, CallRecord) and gone.has(record)
        if (keys := keys_left([record.episode], deleted))
    ]
    left = {
        record.id: None if gone.has(record) else without_deleted(record, deleted)
        for record in records
    }
    return Admitted(
        [*gaps, *(record for record in left.values() if record is not None)],
        frozenset(one for one, record in left.items() if record is None),
        deletion,
    )


async def _deleted(driver: Any, records: Sequence[SpoolRecord]) -> set[UUID]:
    """Return the tombstones among the names in `records`."""
    names = digests(name for record in records for name in names_in(record))
    return {row[0] for row in await driver.fetch(_DELETED, list(names))}


def _late(records: Sequence[SpoolRecord], deleted: Set[UUID]) -> list[CallRecord]:
    """Return the calls of deleted episodes."""
    calls = (record for record in records if isinstance(record, CallRecord))
    return [call for call in calls if without_deleted(call, deleted) is None]


async def begin_deletion(driver: Any) -> int:
    """Keep all batches from being stored until the transaction ends; return its number."""
    # Whoever loses its connection, or is stopped, must not keep all batches waiting.
    await driver.execute(_PATIENCE)
    await driver.execute(_HOLD)
    return int(await driver.fetchval(_NEXT))


async def add(driver: Any, names: Iterable[Named], deletion: int) -> None:
    """Add tombstones in the driver's transaction."""
    if tombstones := digests(names):
        await driver.execute(_ADD, list(tombstones), deletion)


async def known(connection: AsyncConnection, wanted: Collection[UUID]) -> set[UUID]:
    """Return those digests that are tombstones."""
    rows = await connection.execute(_KNOWN, {"wanted": list(wanted)})
    return set(rows.scalars())


async def last_deletion(connection: AsyncConnection) -> int:
    """Return the number of the last deletion; 0 before the first."""
    query = select(func.coalesce(func.max(deleted_names.c.deletion), 0))
    return int((await connection.execute(query)).scalar_one())
