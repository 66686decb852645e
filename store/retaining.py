"""Remove what is older than the days that records are kept for (`PAWL_KEEP_DAYS`).

An episode is outdated once the last call of all its parts was made before the first day that is
kept of its tenant's. Episodes go first, some at a time, each time in one transaction; then whole
days of calls, of which only those of episodes that go on are left
(docs/decisions/070-deleting-episodes.md). Of a tenant whose days are fewer than another's the calls
go row by row instead. One ingester does this at a time.

What batches of records wait for is short: once a day is noted, no call of it is stored any more, so
that its episodes are looked for, and its calls counted, without any lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.database import driver_of
from store.deleting import BY_EPISODE, STRIP, end_updates, keep_writers_out, rewrite
from store.ids import lowest_id_at
from store.keep_days import Cuts
from store.link.claimable import refresh, refresh_wholes
from store.records import Record
from store.schema.partitions import partition_name
from store.tenants import DEFAULT, tenant_of
from store.tombstones import PREFIX, forget_matched

# Key of the advisory lock of whoever removes: another ingester does nothing meanwhile.
RETAIN_LOCK: Final = 0x5041574F
PENDING_LOCK: Final = 0x50415750
# Most episodes, statements or requests that one transaction removes, and most calls of a tenant,
# unless a single episode has more.
MOST: Final = 200
MOST_CALLS: Final = 1000
# Most statements of a tenant that wait for their target.
MOST_PENDING: Final = 100_000
WHY: Final = "an episode that it held was outdated"
LOST_CALLS: Final = (
    "calls of this episode were dropped, because they were older than PAWL_KEEP_DAYS"
)
NOWHERE: Final = UUID(int=0)


def _midnight(day: date) -> datetime:
    """Return when a day begins (UTC)."""
    return datetime.combine(day, time(), UTC)


def _id_at(day: date | None) -> UUID | None:
    """Return the lowest id of a day; None: of no day."""
    return None if day is None else lowest_id_at(_midnight(day))


def tenant_in(column: str) -> str:
    """Return the expression for whose a column's name is, as `store.tenants.tenant_of` says it."""
    separator = "E'\\x1f'"
    return (
        f"CASE WHEN strpos({column}, {separator}) > 1 THEN split_part({column}, {separator}, 1) "
        f"ELSE '{DEFAULT}' END"
    )


def _with_cut(column: str) -> str:
    """Return a join that adds `cut.id` and `cut.at`, where the kept days of a name's tenant begin.

    Both are null where all of the tenant's days are kept. Parameters 1 to 5 are `_parameters`.
    """
    return f"""
        LEFT JOIN unnest($1::text[], $2::uuid[], $3::timestamptz[]) AS own (tenant, id, at)
            ON own.tenant = {tenant_in(column)}
        CROSS JOIN LATERAL (
            SELECT CASE WHEN own.tenant IS NULL THEN $4::uuid ELSE own.id END AS id,
                CASE WHEN own.tenant IS NULL THEN $5::timestamptz ELSE own.at END AS at) AS cut
    """


def _parameters(cuts: Cuts) -> tuple[Any, ...]:
    """Return the first five parameters of a query with `_with_cut`."""
    others = cuts.others
    return (
        list(cuts.of),
        [_id_at(cut) for cut in cuts.of.values()],
        [None if cut is None else _midnight(cut) for cut in cuts.of.values()],
        _id_at(others),
        None if others is None else _midnight(others),
    )


_IS_OUTDATED: Final = """
    w.root IS NULL AND w.deleted_at IS NULL AND w.last_call_id < cut.id AND NOT EXISTS (
        SELECT FROM episodes p WHERE p.root = w.id AND p.last_call_id >= cut.id)
"""
_OUTDATED: Final = f"""
    SELECT w.id FROM episodes w {_with_cut("w.key")}
    WHERE {_IS_OUTDATED} AND w.id > $6 ORDER BY w.id LIMIT $7
"""
_STILL_OUTDATED: Final = f"""
    SELECT w.id, w.key FROM episodes w {_with_cut("w.key")}
    WHERE {_IS_OUTDATED} AND w.id = ANY($6) ORDER BY w.id
"""
# Parts with outdated calls on days that are kept for others, after a day of which nothing is kept.
_WITH_OLD_CALLS: Final = f"""
    SELECT w.id, w.key FROM episodes w {_with_cut("w.key")}
    CROSS JOIN LATERAL (
        SELECT 1 FROM transitions t WHERE t.episode_id = w.id AND t.id < cut.id LIMIT 1) AS old
    WHERE w.deleted_at IS NULL AND w.first_call_id < cut.id AND cut.id > $6
    ORDER BY w.id LIMIT $7
"""
_PARTS: Final = """
    SELECT id, COALESCE(root, id) FROM episodes WHERE id = ANY($1) OR root = ANY($1)
"""
# Something refers to these: that they were spent, or a link of an episode that may go on.
_REFERRED_TO: Final = """
    SELECT DISTINCT COALESCE(e.root, e.id) FROM episodes e WHERE e.id = ANY($1)
        AND (EXISTS (SELECT FROM consumptions c WHERE c.episode_id = e.id)
             OR EXISTS (SELECT FROM links l WHERE l.needed_by = e.id)
             OR EXISTS (SELECT FROM links l WHERE l.provided_by = e.id))
"""
_SPENT: Final = "SELECT count(DISTINCT episode_id) FROM consumptions WHERE episode_id = ANY($1)"
_DAYS: Final = """
    SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'transitions'::regclass AND c.relname < $1 ORDER BY 1 LIMIT 1
"""
# Those that are not set aside for any reason yet.
_GOING_ON: Final = """
    SELECT id FROM episodes e
    WHERE deleted_at IS NULL AND NOT (doubtful AND quarantined_reason IS NOT NULL)
        AND EXISTS (SELECT FROM {partition} t WHERE t.episode_id = e.id)
    LIMIT $1
"""
_MARK: Final = """
    UPDATE episodes SET doubtful = true, quarantined_reason = COALESCE(quarantined_reason, $2)
    WHERE id = ANY($1)
"""
_IS_NOTED: Final = "SELECT COALESCE(max(day) >= $1, false) FROM dropped_days"
_NOTE: Final = """
    INSERT INTO dropped_days (day, calls) VALUES ($1, $2)
    ON CONFLICT (day) DO UPDATE SET calls = dropped_days.calls + excluded.calls, at = now()
"""
_COUNTS: Final = """
    SELECT episode_id, count(*) FROM transitions WHERE episode_id = ANY($1) GROUP BY 1
"""
_OLD_CALLS: Final = "SELECT id FROM transitions WHERE episode_id = ANY($1) AND id < $2"
_DELETE_CALLS: Final = "DELETE FROM transitions WHERE episode_id = ANY($1) AND id < $2"
# Until all ingesters have seen that a day is outdated, and after it, no call of it is stored.
_NOTE_OF_TENANTS: Final = """
    INSERT INTO outdated_days (tenant, day) SELECT unnest($1::text[]), unnest($2::date[]) - 1
    ON CONFLICT (tenant) DO UPDATE SET day = greatest(outdated_days.day, excluded.day)
"""
_STRAY: Final = f"""
    DELETE FROM {{table}} WHERE id IN (
        SELECT s.id FROM {{table}} s {_with_cut("s.target")}
        WHERE s.episode_id IS NULL AND s.at < cut.at LIMIT $6)
"""
# The condition is repeated outside, as a target may come meanwhile.
_PENDING: Final = f"""
    DELETE FROM {{table}} WHERE episode_id IS NULL AND id IN (
        SELECT id FROM (
            SELECT id, at, row_number() OVER (
                PARTITION BY {tenant_in("target")} ORDER BY id DESC) AS place
            FROM {{table}} WHERE episode_id IS NULL AND target IS NOT NULL) pending
        WHERE place > $1 OR at < $2 LIMIT $3)
    RETURNING {{key}}
"""
_EMPTY: Final = "id = ANY($1) AND NOT EXISTS (SELECT FROM feedback f WHERE f.request_id = r.id)"
# Whose a request without a key was, nobody knows once its statements are gone.
_REQUESTS: Final = f"""
    DELETE FROM feedback_requests WHERE id IN (
        SELECT r.id FROM feedback_requests r {_with_cut("r.idempotency_key")}
        WHERE r.id < $6 AND r.at < $7 AND (r.idempotency_key IS NULL OR r.at < cut.at)
            AND NOT EXISTS (SELECT FROM feedback f WHERE f.request_id = r.id)
        ORDER BY r.id LIMIT $8)
"""


class Removed(Record, frozen=True, kw_only=True):
    """Count what one step removed; `unspent` are the episodes that no update had consumed.

    `last` is the last episode that was looked at: those before it need no second look.
    """

    episodes: int = 0
    unspent: int = 0
    calls: int = 0
    statements: int = 0
    day: str | None = None
    last: UUID = NOWHERE


class _Step(NamedTuple):
    """Hold what a step needs: its transaction, the days that are kept, and where it begins.

    Nothing of `latest`, or of a day after it, is outdated.
    """

    connection: AsyncConnection
    driver: Any
    cuts: Cuts
    latest: date
    after: UUID


async def remove_pending(engine: AsyncEngine, days: int) -> int:
    """Remove statements about what did not come in `days`, and a tenant's beyond `MOST_PENDING`.

    Their requests go with them. Return the number of some that were removed; 0: no more are left.
    """
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        if not await driver.fetchval(f"SELECT pg_try_advisory_xact_lock({PENDING_LOCK})"):
            return 0
        # Two clocks have to agree: one that is wrong by a month must not drop all that waits.
        now = min(datetime.now(UTC), await driver.fetchval("SELECT now()"))
        limits = MOST_PENDING, now - timedelta(days=days), MOST_CALLS
        gone = await driver.fetch(_PENDING.format(table="feedback", key="request_id"), *limits)
        requests = [row[0] for row in gone]
        await driver.execute(f"DELETE FROM feedback_requests r WHERE {_EMPTY}", requests)
        events = await driver.fetch(_PENDING.format(table="tool_events", key="id"), *limits)
    return len(gone) + len(events)


async def remove_some(engine: AsyncEngine, cuts: Cuts, after: UUID = NOWHERE) -> Removed | None:
    """Remove some of what is outdated; None: nothing is left, or another process removes it.

    Episodes up to `after` are not outdated, as an earlier step found.

    Raises:
        asyncpg.LockNotAvailableError: readers kept a day from being dropped; try again later.
    """
    if (latest := cuts.of_any) is None:
        return None
    async with engine.begin() as connection:
        driver = await driver_of(connection)
        if not await driver.fetchval(f"SELECT pg_try_advisory_xact_lock({RETAIN_LOCK})"):
            return None
        step = _Step(connection, driver, cuts, latest, after)
        for remove in (_remove_outdated, _remove_old_calls, _end_a_day, _remove_strays):
            if (removed := await remove(step)) is not None:
                return removed
    return None


async def _remove_outdated(step: _Step) -> Removed | None:
    """Remove some episodes that are outdated."""
    driver, values = step.driver, _parameters(step.cuts)
    outdated = [row[0] for row in await driver.fetch(_OUTDATED, *values, step.after, MOST)]
    if not outdated:
        return None
    await keep_writers_out(driver)
    # One of those that were outdated may have got a call since.
    still = dict(await driver.fetch(_STILL_OUTDATED, *values, outdated))
    parts: dict[UUID, list[UUID]] = {whole: [] for whole in still}
    for part, whole in await driver.fetch(_PARTS, list(still)):
        parts[whole].append(part)
    groups = {whole: (tenant_of(key), parts[whole]) for whole, key in still.items()}
    some = list(groups)[: await _count_that_fit(step, groups)]
    removed = await _remove_episodes(step, {whole: groups[whole] for whole in some})
    last = outdated[-1] if len(some) == len(groups) else some[-1]
    return msgspec.structs.replace(removed, last=last)


async def _remove_episodes(step: _Step, groups: Mapping[UUID, tuple[str, list[UUID]]]) -> Removed:
    """Remove whole episodes, each with its tenant and its parts; the locks are held."""
    driver = step.driver
    parts_of = _by_tenant(groups.values())
    ids = [part for parts in parts_of.values() for part in parts]
    # A call that comes once more would begin a removed episode anew.
    await _note(step, parts_of)
    await end_updates(step.connection, driver, ids, WHY)
    spent = await driver.fetchval(_SPENT, ids)
    calls = await _remove_calls(step, parts_of)
    statements = await forget_matched(driver, ids)
    for table in BY_EPISODE:
        await driver.execute(f"DELETE FROM {table} WHERE episode_id = ANY($1)", ids)
    kept = [row[0] for row in await driver.fetch(_REFERRED_TO, ids)]
    stripped = [row[0] for row in await driver.fetch(_PARTS, kept)]
    removed = list(set(ids) - set(stripped))
    await driver.execute("DELETE FROM episode_policies WHERE episode_id = ANY($1)", removed)
    await driver.execute("DELETE FROM episodes WHERE id = ANY($1)", removed)
    await driver.execute(STRIP, stripped, [f"{PREFIX}{one.hex}" for one in stripped])
    await refresh(step.connection, stripped)
    return Removed(
        episodes=len(groups),
        unspent=len(groups) - spent,
        calls=calls,
        statements=sum(statements.values()),
    )


async def _remove_old_calls(step: _Step) -> Removed | None:
    """Remove outdated calls of some episodes that go on, from days that are kept for others."""
    driver, cuts = step.driver, step.cuts
    nobodys = _id_at(cuts.of_all) or NOWHERE
    episodes = await driver.fetch(_WITH_OLD_CALLS, *_parameters(cuts), nobodys, MOST)
    if not episodes:
        return None
    await keep_writers_out(driver)
    groups = {part: (tenant_of(key), [part]) for part, key in episodes}
    some = list(groups)[: await _count_that_fit(step, groups)]
    parts_of = _by_tenant(groups[part] for part in some)
    await _note(step, parts_of)
    await _set_aside(step, some)
    calls = await _remove_calls(step, parts_of)
    return Removed(calls=calls, last=step.after)


def _by_tenant(groups: Iterable[tuple[str, Sequence[UUID]]]) -> dict[str, list[UUID]]:
    by_tenant: dict[str, list[UUID]] = {}
    for tenant, parts in groups:
        by_tenant.setdefault(tenant, []).extend(parts)
    return by_tenant


async def _set_aside(step: _Step, parts: Sequence[UUID]) -> None:
    """Set episodes aside that go on without some of their calls; the locks are held."""
    await end_updates(step.connection, step.driver, parts, WHY)
    await step.driver.execute(_MARK, parts, LOST_CALLS)
    await refresh_wholes(step.driver, parts)


async def _end_a_day(step: _Step) -> Removed | None:
    """Note the oldest day of which nothing is kept, or set aside what goes on, or drop the day."""
    driver, before = step.driver, step.cuts.of_all
    if before is None:
        return None
    partition = await driver.fetchval(_DAYS, partition_name(before))
    if partition is None:
        return None
    day = datetime.strptime(partition.rpartition("_")[2], "%Y%m%d").date()
    if not await driver.fetchval(_IS_NOTED, day):
        await keep_writers_out(driver)
        await driver.execute(_NOTE, day, 0)
        return Removed(last=step.after)
    going_on = await driver.fetch(_GOING_ON.format(partition=partition), MOST)
    if going_on:
        await keep_writers_out(driver)
        await _set_aside(step, [row[0] for row in going_on])
        return Removed(last=step.after)
    return await _drop_day(step, partition, day)


async def _drop_day(step: _Step, partition: str, day: date) -> Removed:
    """Drop a day's calls, of which no more are stored and whose episodes are set aside.

    Those of an episode that is deleted between the count and the lock are counted here, too.
    """
    driver = step.driver
    calls = await driver.fetchval(f"SELECT count(*) FROM {partition}")
    await keep_writers_out(driver)
    # Readers of any day would wait behind this, so it does not wait long for those before it.
    await driver.execute("SET LOCAL lock_timeout = '2s'")
    await driver.execute(f"DROP TABLE {partition}")
    await driver.execute(_NOTE, day, calls)
    return Removed(calls=calls, day=day.isoformat(), last=step.after)


async def _remove_strays(step: _Step) -> Removed | None:
    """Remove outdated statements about what never came, and requests that nothing is left of."""
    driver, values = step.driver, _parameters(step.cuts)
    done = [
        await driver.execute(_STRAY.format(table=table), *values, MOST)
        for table in ("feedback", "tool_events")
    ]
    latest = _id_at(step.latest), _midnight(step.latest)
    done.append(await driver.execute(_REQUESTS, *values, *latest, MOST))
    removed = sum(int(status.rpartition(" ")[2]) for status in done)
    return Removed(statements=removed, last=step.after) if removed else None


# A tenant's calls, row by row, from days that are kept for other tenants


async def _count_that_fit(step: _Step, groups: Mapping[UUID, tuple[str, Sequence[UUID]]]) -> int:
    """Return how many of these episodes, from the first on, one transaction removes.

    `groups` has the tenant of each, and the ids of its parts. Only calls that are removed row by
    row count.
    """
    is_apart = step.cuts.apart
    apart = [part for tenant, parts in groups.values() if is_apart(tenant) for part in parts]
    counts = dict(await step.driver.fetch(_COUNTS, apart)) if apart else {}
    total = 0
    for number, (_, parts) in enumerate(groups.values()):
        total += sum(counts.get(part, 0) for part in parts)
        if number and total > MOST_CALLS:
            return number
    return len(groups)


async def _note(step: _Step, tenants: Iterable[str]) -> None:
    """Note which days of these tenants are outdated: no call of them is stored any more."""
    cuts = {tenant: step.cuts.before(tenant) for tenant in tenants}
    await step.driver.execute(_NOTE_OF_TENANTS, list(cuts), list(cuts.values()))


async def _remove_calls(step: _Step, parts_of: Mapping[str, Sequence[UUID]]) -> int:
    """Remove the outdated calls of episodes, by tenant, whose days are kept for others.

    What other episodes add to such a call is stored whole first. Return how many were removed.
    """
    removed = 0
    for tenant, parts in parts_of.items():
        if step.cuts.apart(tenant):
            before = _id_at(step.cuts.before(tenant))
            calls = [row[0] for row in await step.driver.fetch(_OLD_CALLS, parts, before)]
            await rewrite(step.connection, step.driver, parts, calls)
            await step.driver.execute(_DELETE_CALLS, parts, before)
            removed += len(calls)
    return removed
