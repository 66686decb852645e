"""Keep deleted records from being stored again: a tombstone is the digest of a deleted name.

Names are keys of episodes, and ids of calls and responses, as in feedback. Their stored form has
the tenant (`store.tenants`), so that each tenant has its own tombstones.

A transaction that stores a batch reads the tombstones first, and holds a shared lock until its
commit. A deletion holds the same lock exclusively. So a batch is stored wholly before a deletion,
which then finds all of it, or wholly after it, and then sees its tombstones
(docs/decisions/070-deleting-episodes.md).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from datetime import date, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.driver import Driver
from store.ids import lowest_id_at, time_of
from store.records import CallRecord, FeedbackRecord, GapRecord, SpoolRecord, TargetKind
from store.schema.tables import deleted_names
from store.tenants import name_in_same_tenant

# A kind of target, and a name of that kind.
Named = tuple[TargetKind, str]
R = TypeVar("R", bound=SpoolRecord)
# This prefix and a digest replace the key of a deleted episode. No client can give an episode such
# a name: names are printable.
DELETED_PREFIX: Final = "\x1fdeleted:"


def tombstone_of(kind: TargetKind, name: str) -> UUID:
    """Return the tombstone of a name: the first 16 bytes of a SHA-256."""
    hashed = f"{kind}\0{name}".encode(errors="surrogatepass")
    return UUID(bytes=sha256(hashed).digest()[:16])


def key_once_deleted(key: str) -> str:
    """Return the text that replaces an episode's key once the episode is deleted."""
    return f"{DELETED_PREFIX}{tombstone_of('episode', key).hex}"


def names_in(record: SpoolRecord) -> Iterator[Named]:
    """Yield the names in a record that may have been deleted; an outage has no names."""
    if isinstance(record, CallRecord):
        yield "episode", record.episode
    elif isinstance(record, GapRecord):
        yield from (("episode", key) for key in record.episodes)
    elif isinstance(record, FeedbackRecord):
        yield from ((item.target_kind, item.target) for item in record.items)


def names_of_call(call: CallRecord) -> list[Named]:
    """Return the names by which later records may refer to `call`: its id and response id."""
    names: list[Named] = [("call", name_in_same_tenant(call.episode, str(call.id)))]
    if call.response_id is not None:
        names.append(("response", call.response_id))
    return names


def tombstones_of(names: Iterable[Named]) -> set[UUID]:
    """Return the tombstones that these names have once they are deleted."""
    return {tombstone_of(kind, name) for kind, name in names}


def undeleted_keys(keys: Sequence[str], deleted: Set[UUID]) -> tuple[str, ...]:
    """Return those of `keys` whose tombstones are not in `deleted`."""
    return tuple(key for key in keys if tombstone_of("episode", key) not in deleted)


def without_deleted(record: R, deleted: Set[UUID]) -> R | None:
    """Return a record without its parts about names in `deleted`, or None if nothing is left.

    A feedback request, and a gap, may be about several episodes.
    """
    if isinstance(record, CallRecord):
        return record if undeleted_keys([record.episode], deleted) else None
    if isinstance(record, GapRecord):
        keys = undeleted_keys(record.episodes, deleted)
        return msgspec.structs.replace(record, episodes=keys) if keys else None
    if isinstance(record, FeedbackRecord):
        items = tuple(
            item
            for item in record.items
            if tombstone_of(item.target_kind, item.target) not in deleted
        )
        return msgspec.structs.replace(record, items=items) if items else None
    return record


# Statements whose target had not arrived when they were stored.
_UNMATCHED: Final = """
    DELETE FROM {table} s USING unnest($1::text[], $2::text[]) AS n (kind, name)
    WHERE s.episode_id IS NULL AND s.target_kind = n.kind AND s.target = n.name
    RETURNING s.at
"""
_MATCHED: Final = "DELETE FROM {table} s WHERE s.episode_id = ANY($1) RETURNING s.at"
# A request's statements have its time, and ids that were made within moments of it, so that primary
# keys find them. Two requests of one microsecond keep each other, which is harmless.
_EMPTY: Final = """
    DELETE FROM feedback_requests r
    WHERE r.at = $1 AND r.id >= $2 AND r.id < $3
        AND NOT EXISTS (SELECT FROM feedback f WHERE f.request_id = r.id)
        AND NOT EXISTS (SELECT FROM tool_events e WHERE e.at = $1 AND e.id >= $2 AND e.id < $3
                        AND e.target_kind IS NOT NULL)
    RETURNING 1
"""
MADE_BEFORE: Final = timedelta(seconds=1)
MADE_AFTER: Final = timedelta(hours=1)


async def forget_unmatched(driver: Driver, names: Sequence[Named]) -> dict[str, int]:
    """Delete the statements about `names` that still wait for their target; count by table."""
    columns = [list(column) for column in zip(*names, strict=True)] if names else [[], []]
    return await _forget(driver, _UNMATCHED, columns)


async def forget_matched(driver: Driver, episode_ids: Sequence[UUID]) -> dict[str, int]:
    """Delete the feedback and tool events of these episodes; return the numbers by table."""
    return await _forget(driver, _MATCHED, [list(episode_ids)])


async def _forget(driver: Driver, query: str, values: Sequence[Any]) -> dict[str, int]:
    feedback = await driver.fetch(query.format(table="feedback"), *values)
    events = await driver.fetch(query.format(table="tool_events"), *values)
    moments = {row[0] for row in (*feedback, *events)}
    return {
        "feedback": len(feedback),
        "tool_events": len(events),
        "feedback_requests": await _forget_requests(driver, moments),
    }


async def _forget_requests(driver: Driver, moments: Iterable[datetime]) -> int:
    """Delete the feedback requests of these times that are left empty; return how many."""
    requests = 0
    for at in sorted(moments):
        bounds = lowest_id_at(at - MADE_BEFORE), lowest_id_at(at + MADE_AFTER)
        requests += len(await driver.fetch(_EMPTY, at, *bounds))
    return requests


# Key of the advisory lock that is held until the transaction ends.
DELETE_LOCK: Final = 0x5041574E

_LOCK_SHARED: Final = f"SELECT pg_advisory_xact_lock_shared({DELETE_LOCK})"
_LIMIT_IDLE_TIME: Final = "SET LOCAL idle_in_transaction_session_timeout = '30s'"
_LOCK_EXCLUSIVELY: Final = f"SELECT pg_advisory_xact_lock({DELETE_LOCK})"
# A separate statement after the lock's: it sees what was committed during the wait.
_LAST: Final = """
    SELECT (SELECT max(deletion) FROM deleted_names) AS deletion,
        (SELECT max(day) FROM dropped_days) AS dropped
"""
_DELETED: Final = "SELECT digest FROM deleted_names WHERE digest = ANY($1)"
# One array: statements have no room for as many parameters as one record may have names.
_KNOWN: Final = text("SELECT digest FROM deleted_names WHERE digest = ANY(CAST(:wanted AS uuid[]))")
_NEXT: Final = "SELECT COALESCE(max(deletion), 0) + 1 FROM deleted_names"
_ADD: Final = """
    INSERT INTO deleted_names (digest, deletion) SELECT unnest($1::uuid[]), $2
    ON CONFLICT DO NOTHING
"""


class AdmittedRecords(NamedTuple):
    """The records of a batch to store, the ids of the others, and the last deletion's number."""

    records: list[SpoolRecord]
    left_out: frozenset[UUID]
    deletion: int


async def admit_records(driver: Driver, records: Sequence[SpoolRecord]) -> AdmittedRecords:
    """Leave deleted records out of a batch, and block deletions until the transaction ends.

    Calls of dropped days are left out, too, and replaced by a gap. If a call of a deleted episode
    is left out, the names by which feedback may refer to the call become tombstones.
    """
    await driver.execute(_LOCK_SHARED)
    [last] = await driver.fetch(_LAST)
    deletion = last["deletion"] or 0
    dropped: date | None = last["dropped"]
    # If nothing was ever deleted, no name has to be hashed.
    deleted = set[UUID]()
    if deletion:
        names = tombstones_of(name for record in records for name in names_in(record))
        deleted = {row[0] for row in await driver.fetch(_DELETED, list(names))}
    if not deleted and dropped is None:
        return AdmittedRecords(list(records), frozenset(), deletion)
    # Calls of deleted episodes.
    names_of_deleted = [
        name
        for record in records
        if isinstance(record, CallRecord) and without_deleted(record, deleted) is None
        for name in names_of_call(record)
    ]
    await add_tombstones(driver, names_of_deleted, deletion)
    await forget_unmatched(driver, names_of_deleted)
    # Feedback about these calls may be in the same batch.
    deleted |= tombstones_of(names_of_deleted)
    of_dropped_days = {
        record.id: record
        for record in records
        if isinstance(record, CallRecord) and dropped and time_of(record.id).date() <= dropped
    }
    # The episode may go on, and then it lacks this call (`store.link.outages`).
    gaps = [
        GapRecord(id=call.id, episodes=keys)
        for call in of_dropped_days.values()
        if (keys := undeleted_keys([call.episode], deleted))
    ]
    admitted = {
        record.id: None if record.id in of_dropped_days else without_deleted(record, deleted)
        for record in records
    }
    return AdmittedRecords(
        [*gaps, *(record for record in admitted.values() if record is not None)],
        frozenset(record_id for record_id, record in admitted.items() if record is None),
        deletion,
    )


async def begin_deletion(driver: Driver) -> int:
    """Keep batches from being stored until the transaction ends; return the deletion's number."""
    # A process that loses its connection, or is stopped, must not keep all batches waiting.
    await driver.execute(_LIMIT_IDLE_TIME)
    await driver.execute(_LOCK_EXCLUSIVELY)
    return int(await driver.fetchval(_NEXT))


async def add_tombstones(driver: Driver, names: Iterable[Named], deletion: int) -> None:
    """Store the tombstones of `names`, with the deletion's number, in the driver's transaction."""
    if tombstones := tombstones_of(names):
        await driver.execute(_ADD, list(tombstones), deletion)


async def known_tombstones(connection: AsyncConnection, wanted: Collection[UUID]) -> set[UUID]:
    """Return those of the digests `wanted` that are stored tombstones."""
    rows = await connection.execute(_KNOWN, {"wanted": list(wanted)})
    return set(rows.scalars())


async def last_deletion(connection: AsyncConnection) -> int:
    """Return the number of the last deletion; 0 before the first."""
    query = select(func.coalesce(func.max(deleted_names.c.deletion), 0))
    return int((await connection.execute(query)).scalar_one())
