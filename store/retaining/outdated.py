"""Remove outdated episodes, and drop the partitions of outdated days.

An episode is outdated once the last call of all its parts was made before the first day that is
kept of its tenant's. Episodes go first, some at a time, each time in one transaction; then whole
days of calls, of which only those of episodes that go on are left
(docs/decisions/070-deleting-episodes.md). Of a tenant whose days are fewer than another's the calls
go row by row instead. One ingester does this at a time.

What batches of records wait for is short: once a day is noted, no call of it is stored any more, so
that its episodes are looked for, and its calls counted, without any lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.connection.engine import driver_of
from store.deleting.delete import BY_EPISODE, STRIP, end_updates
from store.deleting.names import PREFIX
from store.deleting.statements import forget_matched
from store.deleting.tombstones import begin_deletion
from store.link.claimable import refresh, refresh_wholes
from store.link.settle import SETTLE_LOCK
from store.records import Record
from store.retaining.calls import few, note, remove_calls
from store.retaining.periods import Cuts
from store.retaining.strays import remove_strays
from store.retaining.tenant_cuts import NOWHERE, id_at, parameters, with_cut
from store.schema.partitions import partition_name
from store.tenants import tenant_of

# Key of the advisory lock of whoever removes: another ingester does nothing meanwhile.
RETAIN_LOCK: Final = 0x5041574F
# Most episodes, or statements, that one transaction removes.
MOST: Final = 200
WHY: Final = "an episode that it held was outdated"
LOST_CALLS: Final = (
    "calls of this episode were dropped, because they were older than PAWL_KEEP_DAYS"
)

_IS_OUTDATED: Final = """
    w.root IS NULL AND w.deleted_at IS NULL AND w.last_call_id < cut.id AND NOT EXISTS (
        SELECT FROM episodes p WHERE p.root = w.id AND p.last_call_id >= cut.id)
"""
_OUTDATED: Final = f"""
    SELECT w.id FROM episodes w {with_cut("w.key")}
    WHERE {_IS_OUTDATED} AND w.id > $6 ORDER BY w.id LIMIT $7
"""
_STILL_OUTDATED: Final = f"""
    SELECT w.id, w.key FROM episodes w {with_cut("w.key")}
    WHERE {_IS_OUTDATED} AND w.id = ANY($6) ORDER BY w.id
"""
# Parts with outdated calls on days that are kept for others, after a day of which nothing is kept.
_WITH_OLD_CALLS: Final = f"""
    SELECT w.id, w.key FROM episodes w {with_cut("w.key")}
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


async def remove_some(engine: AsyncEngine, cuts: Cuts, after: UUID = NOWHERE) -> Removed | None:
    """Remove some of what is outdated; None: nothing is left to remove.

    None is returned, too, while another process removes.

    Args:
        engine: the database.
        cuts: the first day of which each tenant's records are kept.
        after: episodes up to this one are not outdated, as an earlier step found.

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


async def _alone(driver: Any) -> None:
    """Keep batches from being stored, and references from being resolved, until the end."""
    await begin_deletion(driver)
    await driver.execute("SELECT pg_advisory_xact_lock($1)", SETTLE_LOCK)


async def _remove_outdated(step: _Step) -> Removed | None:
    """Remove some episodes that are outdated."""
    driver, values = step.driver, parameters(step.cuts)
    outdated = [row[0] for row in await driver.fetch(_OUTDATED, *values, step.after, MOST)]
    if not outdated:
        return None
    await _alone(driver)
    # One of those that were outdated may have got a call since.
    still = dict(await driver.fetch(_STILL_OUTDATED, *values, outdated))
    parts: dict[UUID, list[UUID]] = {whole: [] for whole in still}
    for part, whole in await driver.fetch(_PARTS, list(still)):
        parts[whole].append(part)
    groups = {whole: (tenant_of(key), parts[whole]) for whole, key in still.items()}
    some = list(groups)[: await few(driver, step.cuts, groups)]
    removed = await _remove_episodes(step, {whole: groups[whole] for whole in some})
    last = outdated[-1] if len(some) == len(groups) else some[-1]
    return msgspec.structs.replace(removed, last=last)


async def _remove_episodes(step: _Step, groups: Mapping[UUID, tuple[str, list[UUID]]]) -> Removed:
    """Remove whole episodes, each with its tenant and its parts; the locks are held."""
    connection, driver, cuts = step.connection, step.driver, step.cuts
    parts_of = _by_tenant(groups.values())
    ids = [part for parts in parts_of.values() for part in parts]
    # A call that comes once more would begin a removed episode anew.
    await note(driver, cuts, list(parts_of))
    await end_updates(connection, driver, ids, WHY)
    spent = await driver.fetchval(_SPENT, ids)
    calls = await remove_calls(connection, driver, cuts, parts_of)
    statements = await forget_matched(driver, ids)
    for table in BY_EPISODE:
        await driver.execute(f"DELETE FROM {table} WHERE episode_id = ANY($1)", ids)
    kept = [row[0] for row in await driver.fetch(_REFERRED_TO, ids)]
    stripped = [row[0] for row in await driver.fetch(_PARTS, kept)]
    removed = list(set(ids) - set(stripped))
    await driver.execute("DELETE FROM episode_policies WHERE episode_id = ANY($1)", removed)
    await driver.execute("DELETE FROM episodes WHERE id = ANY($1)", removed)
    await driver.execute(STRIP, stripped, [f"{PREFIX}{one.hex}" for one in stripped])
    await refresh(connection, stripped)
    return Removed(
        episodes=len(groups),
        unspent=len(groups) - spent,
        calls=calls,
        statements=sum(statements.values()),
    )


async def _remove_old_calls(step: _Step) -> Removed | None:
    """Remove outdated calls of some episodes that go on, from days that are kept for others."""
    driver, cuts = step.driver, step.cuts
    nobodys = id_at(cuts.of_all) or NOWHERE
    episodes = await driver.fetch(_WITH_OLD_CALLS, *parameters(cuts), nobodys, MOST)
    if not episodes:
        return None
    await _alone(driver)
    groups = {part: (tenant_of(key), [part]) for part, key in episodes}
    some = list(groups)[: await few(driver, cuts, groups)]
    parts_of = _by_tenant(groups[part] for part in some)
    await note(driver, cuts, list(parts_of))
    await _set_aside(step, some)
    calls = await remove_calls(step.connection, driver, cuts, parts_of)
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
        await _alone(driver)
        await driver.execute(_NOTE, day, 0)
        return Removed(last=step.after)
    going_on = await driver.fetch(_GOING_ON.format(partition=partition), MOST)
    if going_on:
        await _alone(driver)
        await _set_aside(step, [row[0] for row in going_on])
        return Removed(last=step.after)
    return await _drop_day(step, partition, day)


async def _drop_day(step: _Step, partition: str, day: date) -> Removed:
    """Drop a day's calls, of which no more are stored and whose episodes are set aside.

    Those of an episode that is deleted between the count and the lock are counted here, too.
    """
    driver = step.driver
    calls = await driver.fetchval(f"SELECT count(*) FROM {partition}")
    await _alone(driver)
    # Readers of any day would wait behind this, so it does not wait long for those before it.
    await driver.execute("SET LOCAL lock_timeout = '2s'")
    await driver.execute(f"DROP TABLE {partition}")
    await driver.execute(_NOTE, day, calls)
    return Removed(calls=calls, day=day.isoformat(), last=step.after)


async def _remove_strays(step: _Step) -> Removed | None:
    """Remove outdated statements about what never came, and what is left of requests."""
    removed = await remove_strays(step.driver, step.cuts, step.latest, MOST)
    return Removed(statements=removed, last=step.after) if removed else None
