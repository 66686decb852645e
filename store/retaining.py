"""Remove records that are older than `PAWL_KEEP_DAYS`.

An episode is outdated once the last calls of all its parts are older than the first day that is
kept. Outdated episodes are removed first, some in each transaction, and then the calls of whole
days. An episode with such calls and newer ones is quarantined
(docs/decisions/070-deleting-episodes.md). One ingester at a time does this.

First the last day to remove is recorded: from then on, no call up to that day is stored. Therefore
outdated episodes are searched, and calls counted, without a lock, and batches of records wait only
briefly.
"""

from datetime import UTC, date, datetime, time, timedelta
from typing import Final, NamedTuple
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.database import driver_of
from store.deleting import BY_EPISODE, STRIP_EPISODES, abandon_updates, keep_writers_out
from store.driver import Driver
from store.ids import lowest_id_at
from store.link.claimable import refresh_policy_rows, refresh_with_wholes
from store.records import Record
from store.schema.partitions import partition_name
from store.tenants import DEFAULT
from store.tombstones import DELETED_PREFIX, forget_matched

# Key of the advisory lock of the ingester that removes records; others remove nothing meanwhile.
RETAIN_LOCK: Final = 0x5041574F
PENDING_LOCK: Final = 0x50415750
# Most episodes, statements or requests that one transaction removes.
MOST_AT_ONCE: Final = 200
# Most statements of a tenant that may wait for their target.
MOST_PENDING: Final = 100_000
# Why an update is abandoned.
WHY_ABANDONED: Final = "an episode that it held was outdated"
LOST_CALLS: Final = (
    "calls of this episode were dropped, because they were older than PAWL_KEEP_DAYS"
)
LOWEST_ID: Final = UUID(int=0)


def tenant_sql(column: str) -> str:
    """Return SQL for the tenant of the stored name in a column, like `store.tenants.tenant_of`."""
    separator = "E'\\x1f'"
    return (
        f"CASE WHEN strpos({column}, {separator}) > 1 THEN split_part({column}, {separator}, 1) "
        f"ELSE '{DEFAULT}' END"
    )


_OUTDATED: Final = """
    SELECT w.id FROM episodes w
    WHERE w.root IS NULL AND w.deleted_at IS NULL AND w.last_call_id < $1 AND NOT EXISTS (
        SELECT FROM episodes p WHERE p.root = w.id AND p.last_call_id >= $1)
"""
_SOME_OUTDATED: Final = f"{_OUTDATED} AND w.id > $2 ORDER BY w.id LIMIT $3"
_STILL_OUTDATED: Final = f"{_OUTDATED} AND w.id = ANY($2) ORDER BY w.id"
_PARTS: Final = """
    SELECT id, COALESCE(root, id) FROM episodes WHERE id = ANY($1) OR root = ANY($1)
"""
# Episodes that a consumption refers to, or a link of an episode that may go on.
_REFERRED_TO: Final = """
    SELECT DISTINCT COALESCE(e.root, e.id) FROM episodes e WHERE e.id = ANY($1)
        AND (EXISTS (SELECT FROM consumptions c WHERE c.episode_id = e.id)
             OR EXISTS (SELECT FROM links l WHERE l.needed_by = e.id)
             OR EXISTS (SELECT FROM links l WHERE l.provided_by = e.id))
"""
_SPENT: Final = "SELECT count(DISTINCT episode_id) FROM consumptions WHERE episode_id = ANY($1)"
_OLDEST_DAY: Final = """
    SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'transitions'::regclass AND c.relname < $1 ORDER BY 1 LIMIT 1
"""
# Episodes that are not quarantined yet, with calls of a day.
_TO_QUARANTINE: Final = """
    SELECT id FROM episodes e
    WHERE deleted_at IS NULL AND NOT (doubtful AND quarantined_reason IS NOT NULL)
        AND EXISTS (SELECT FROM {partition} t WHERE t.episode_id = e.id)
    LIMIT $1
"""
_QUARANTINE: Final = """
    UPDATE episodes SET doubtful = true, quarantined_reason = COALESCE(quarantined_reason, $2)
    WHERE id = ANY($1)
"""
_IS_RECORDED: Final = "SELECT COALESCE(max(day) >= $1, false) FROM dropped_days"
_RECORD_DAY: Final = """
    INSERT INTO dropped_days (day, calls) VALUES ($1, $2)
    ON CONFLICT (day) DO UPDATE SET calls = dropped_days.calls + excluded.calls, at = now()
"""
_STRAY: Final = """
    DELETE FROM {table} WHERE id IN (
        SELECT id FROM {table} WHERE episode_id IS NULL AND at < $1 LIMIT $2)
"""
# The first condition is repeated outside, as a statement's target may be stored meanwhile.
_PENDING: Final = f"""
    DELETE FROM {{table}} WHERE episode_id IS NULL AND id IN (
        SELECT id FROM (
            SELECT id, at, row_number() OVER (
                PARTITION BY {tenant_sql("target")} ORDER BY id DESC) AS place
            FROM {{table}} WHERE episode_id IS NULL AND target IS NOT NULL) pending
        WHERE place > $1 OR at < $2 LIMIT $3)
    RETURNING {{key}}
"""
_EMPTY: Final = "id = ANY($1) AND NOT EXISTS (SELECT FROM feedback f WHERE f.request_id = r.id)"
_REQUESTS: Final = """
    DELETE FROM feedback_requests WHERE id IN (
        SELECT r.id FROM feedback_requests r
        WHERE r.id < $1 AND r.at < $2
            AND NOT EXISTS (SELECT FROM feedback f WHERE f.request_id = r.id)
        ORDER BY r.id LIMIT $3)
"""


class Removed(Record, frozen=True, kw_only=True):
    """Counts of what one step removed; `unspent` counts episodes that no update had consumed.

    `day` is the day whose calls were dropped, if any. `last` is the last episode that was examined:
    the next step continues after it.
    """

    episodes: int = 0
    unspent: int = 0
    calls: int = 0
    statements: int = 0
    day: str | None = None
    last: UUID = LOWEST_ID


class _Step(NamedTuple):
    """A step's transaction and limits.

    `before` is the first day that is kept, and `first_id` the lowest id of that day. Earlier steps
    have examined the episodes up to `after`.
    """

    connection: AsyncConnection
    driver: Driver
    before: date
    first_id: UUID
    after: UUID


async def remove_pending(engine: AsyncEngine, days: int) -> int:
    """Remove some statements that have waited too long for their target, or are too many.

    A statement is removed once it is older than `days` days, or its tenant has `MOST_PENDING` newer
    ones that wait, too; so are feedback requests left empty. Return how many statements were
    removed: 0 if none is left to remove, or if another process is removing them.
    """
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        if not await driver.fetchval(f"SELECT pg_try_advisory_xact_lock({PENDING_LOCK})"):
            return 0
        # The earlier of two clocks: one that is a month ahead must not drop all statements.
        now = min(datetime.now(UTC), await driver.fetchval("SELECT now()"))
        limits = MOST_PENDING, now - timedelta(days=days), MOST_AT_ONCE
        gone = await driver.fetch(_PENDING.format(table="feedback", key="request_id"), *limits)
        requests = [row[0] for row in gone]
        await driver.execute(f"DELETE FROM feedback_requests r WHERE {_EMPTY}", requests)
        events = await driver.fetch(_PENDING.format(table="tool_events", key="id"), *limits)
    return len(gone) + len(events)


async def remove_some(engine: AsyncEngine, before: date, after: UUID = LOWEST_ID) -> Removed | None:
    """Take one step of removing records older than the day `before`; return what it removed.

    Return None if nothing is left, or if another process is removing records. Earlier steps have
    examined the episodes up to `after`.

    Raises:
        asyncpg.LockNotAvailableError: readers kept a day from being dropped; try again later.
    """
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        if not await driver.fetchval(f"SELECT pg_try_advisory_xact_lock({RETAIN_LOCK})"):
            return None
        step = _Step(connection, driver, before, lowest_id_at(_midnight(before)), after)
        for remove in (
            _record_last_removed_day,
            _remove_outdated,
            _quarantine_or_drop_day,
            _remove_unmatched,
        ):
            if (removed := await remove(step)) is not None:
                return removed
    return None


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


async def _record_last_removed_day(step: _Step) -> Removed | None:
    """Record the last day that is not kept, so that no call up to that day is stored any more.

    Return None if it was recorded before.
    """
    last = step.before - timedelta(days=1)
    if await step.driver.fetchval(_IS_RECORDED, last):
        return None
    await keep_writers_out(step.driver)
    await step.driver.execute(_RECORD_DAY, last, 0)
    return Removed(last=step.after)


async def _remove_outdated(step: _Step) -> Removed | None:
    driver = step.driver
    rows = await driver.fetch(_SOME_OUTDATED, step.first_id, step.after, MOST_AT_ONCE)
    if not rows:
        return None
    outdated = [row[0] for row in rows]
    await keep_writers_out(driver)
    # An outdated episode may have got a call since.
    still = [row[0] for row in await driver.fetch(_STILL_OUTDATED, step.first_id, outdated)]
    ids = [row[0] for row in await driver.fetch(_PARTS, still)]
    await abandon_updates(step.connection, driver, ids, WHY_ABANDONED)
    spent = await driver.fetchval(_SPENT, ids)
    statements = await forget_matched(driver, ids)
    for table in BY_EPISODE:
        await driver.execute(f"DELETE FROM {table} WHERE episode_id = ANY($1)", ids)
    kept = [row[0] for row in await driver.fetch(_REFERRED_TO, ids)]
    stripped = [row[0] for row in await driver.fetch(_PARTS, kept)]
    removed = list(set(ids) - set(stripped))
    await driver.execute("DELETE FROM episode_policies WHERE episode_id = ANY($1)", removed)
    await driver.execute("DELETE FROM episodes WHERE id = ANY($1)", removed)
    await driver.execute(
        STRIP_EPISODES, stripped, [f"{DELETED_PREFIX}{one.hex}" for one in stripped]
    )
    await refresh_policy_rows(step.connection, stripped)
    return Removed(
        episodes=len(still),
        unspent=len(still) - spent,
        statements=sum(statements.values()),
        last=outdated[-1],
    )


async def _quarantine_or_drop_day(step: _Step) -> Removed | None:
    """Quarantine episodes with calls of the oldest outdated day, or drop the day if all are."""
    driver = step.driver
    partition = await driver.fetchval(_OLDEST_DAY, partition_name(step.before))
    if partition is None:
        return None
    query = _TO_QUARANTINE.format(partition=partition)
    ids = [row[0] for row in await driver.fetch(query, MOST_AT_ONCE)]
    if not ids:
        return await _drop_day(step, partition)
    await keep_writers_out(driver)
    await abandon_updates(step.connection, driver, ids, WHY_ABANDONED)
    await driver.execute(_QUARANTINE, ids, LOST_CALLS)
    await refresh_with_wholes(driver, ids)
    return Removed(last=step.after)


async def _drop_day(step: _Step, partition: str) -> Removed:
    """Drop all calls of a day, and record their number; the episodes are quarantined already.

    The number includes calls that are deleted between the count and the lock.
    """
    driver, day = step.driver, datetime.strptime(partition.rpartition("_")[2], "%Y%m%d").date()
    calls = await driver.fetchval(f"SELECT count(*) FROM {partition}")
    await keep_writers_out(driver)
    # New readers of any day wait behind this lock, so it must not wait long for earlier readers.
    await driver.execute("SET LOCAL lock_timeout = '2s'")
    await driver.execute(f"DROP TABLE {partition}")
    await driver.execute(_RECORD_DAY, day, calls)
    return Removed(calls=calls, day=day.isoformat(), last=step.after)


async def _remove_unmatched(step: _Step) -> Removed | None:
    """Remove outdated statements without a stored target, and empty feedback requests."""
    driver, at = step.driver, _midnight(step.before)
    done = [
        await driver.execute(_STRAY.format(table=table), at, MOST_AT_ONCE)
        for table in ("feedback", "tool_events")
    ]
    done.append(await driver.execute(_REQUESTS, step.first_id, at, MOST_AT_ONCE))
    removed = sum(int(status.rpartition(" ")[2]) for status in done)
    return Removed(statements=removed, last=step.after) if removed else None
