"""Delete an episode from the ledger, in one transaction.

What remains says nothing of it: a row of `episodes` without its key, task and rewards, to which
consumptions and links of other episodes refer, and tombstones of its names. So no policy trains on
it twice, no join of other episodes changes, and nothing of it is stored again.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from store.connection.engine import driver_of
from store.deleting.names import Named, key_once_deleted
from store.deleting.receipts import Receipt, adapters_of, linked_to
from store.deleting.statements import forget_matched, forget_unmatched
from store.deleting.tombstones import add, begin_deletion
from store.link.claimable import refresh
from store.link.settle import SETTLE_LOCK
from store.read.episodes import whole_calls
from store.tenants import same_tenant
from store.updates.claims import release
from store.values.digests import TWIN

WHY: Final = "an episode that it held was deleted"

# Updates that hold the episode must end first. Their episodes are locked, too, in the order of
# keys as everywhere.
_HOLDING: Final = """
    SELECT DISTINCT u.id FROM episode_policies p JOIN updates u ON u.id = p.claimed_by
    WHERE p.episode_id = ANY($1) AND u.state = 'running'
"""
_LOCK: Final = """
    SELECT FROM episodes WHERE id = ANY($1)
        OR id IN (SELECT episode_id FROM episode_policies WHERE claimed_by = ANY($2))
    ORDER BY key FOR NO KEY UPDATE
"""
_PARTS: Final = """
    SELECT id, key, root IS NULL AS is_whole FROM episodes
    WHERE (id = $1 OR root = $1) AND deleted_at IS NULL ORDER BY first_call_id
"""
_WHOLE: Final = "SELECT COALESCE(root, id) FROM episodes WHERE key = $1"
_CALLS: Final = "SELECT id, response_id FROM transitions WHERE episode_id = ANY($1)"
# Calls of other episodes that may be stored as additions to one of these: a base is found by the
# fingerprints that the addition needs, of either split.
_ADDING: Final = f"""
    SELECT t.id FROM transitions t WHERE t.parent_id = ANY($2) AND t.episode_id <> ALL ($1)
        AND t.id IN (
            SELECT n.call_id FROM provided_fingerprints p JOIN needed_fingerprints n
                ON n.digest = ANY(ARRAY[p.digest, {TWIN.format("p.digest")}])
            WHERE p.episode_id = ANY($1))
"""
_REWRITE: Final = """
    UPDATE transitions SET parent_id = NULL, request_prefix = NULL, request_suffix = NULL,
        prompt_prefix = NULL, request = $2, prompt_ids = $3 WHERE id = $1
"""
# Tables beside the calls' own of which an episode's rows are deleted.
BY_EPISODE: Final = ("judgements", "provided_fingerprints", "needed_fingerprints")
# Parameters: ids of episodes, and what they have in place of their keys.
STRIP: Final = """
    UPDATE episodes e SET key = s.key, task = NULL, task_named = false, task_from = NULL,
        joined_task = NULL, scored_at = NULL, call_scored_at = NULL,
        reward = NULL,
        quarantined_reason = 'deleted', deleted_at = now()
    FROM unnest($1::uuid[], $2::text[]) AS s (id, key) WHERE e.id = s.id
"""


async def delete_episode(connection: AsyncConnection, whole: UUID) -> Receipt | None:
    """Delete an episode and all its parts in the caller's transaction; None: it is not there.

    Until the transaction ends, no batch of records is stored and no reference is resolved.
    """
    driver = await driver_of(connection)
    deletion = await begin_deletion(driver)
    await driver.execute("SELECT pg_advisory_xact_lock($1)", SETTLE_LOCK)
    parts = await driver.fetch(_PARTS, whole)
    if not parts:
        return None
    ids, keys = [part["id"] for part in parts], [part["key"] for part in parts]
    abandoned = await end_updates(connection, driver, ids, WHY)
    adapters = await adapters_of(driver, ids)
    calls = await driver.fetch(_CALLS, ids)
    rewritten = await rewrite(connection, driver, ids, [row["id"] for row in calls])
    names = _names(keys, calls)
    removed = _added(await forget_matched(driver, ids), await forget_unmatched(driver, names))
    for table in ("transitions", *BY_EPISODE):
        done = await driver.execute(f"DELETE FROM {table} WHERE episode_id = ANY($1)", ids)
        removed[table] = int(done.rpartition(" ")[2])
    await add(driver, names, deletion)
    await driver.execute(STRIP, ids, [key_once_deleted(key) for key in keys])
    await refresh(connection, ids)
    return Receipt(
        episode=next((part["key"] for part in parts if part["is_whole"]), keys[0]),
        id=whole,
        state="deleted",
        keys=tuple(keys),
        removed=removed,
        rewritten_calls=rewritten,
        abandoned_updates=abandoned,
        trained=adapters.trained,
        carried_by=adapters.carried_by,
        linked=await linked_to(driver, ids),
    )


async def mark_deleted(connection: AsyncConnection, key: str) -> Receipt:
    """Mark a key that is not recorded as deleted, in the caller's transaction."""
    driver = await driver_of(connection)
    deletion = await begin_deletion(driver)
    # It may have been stored since it was looked for.
    if (whole := await driver.fetchval(_WHOLE, key)) is not None:
        receipt = await delete_episode(connection, whole)
        assert receipt is not None
        return receipt
    names: list[Named] = [("episode", key)]
    await add(driver, names, deletion)
    return Receipt(episode=key, state="marked", removed=await forget_unmatched(driver, names))


async def deleted_before(connection: AsyncConnection, name: str, whole: UUID) -> Receipt:
    """Return the receipt of an episode that was deleted before: what is still known of it."""
    driver = await driver_of(connection)
    parts = await driver.fetch("SELECT id FROM episodes WHERE id = $1 OR root = $1", whole)
    adapters = await adapters_of(driver, [row[0] for row in parts])
    return Receipt(
        episode=name,
        id=whole,
        state="deleted_before",
        trained=adapters.trained,
        carried_by=adapters.carried_by,
    )


async def end_updates(
    connection: AsyncConnection, driver: Any, ids: Sequence[UUID], why: str
) -> tuple[UUID, ...]:
    """Lock the episodes, and abandon the running updates that hold one of them; return these."""
    holding = [row[0] for row in await driver.fetch(_HOLDING, ids)]
    await driver.execute(_LOCK, ids, holding)
    # Looked at again: one may have ended, and another begun, while this waited for the locks.
    held = [row[0] for row in await driver.fetch(_HOLDING, ids)]
    for update_id in held:
        await release(connection, update_id, why)
    return tuple(held)


def _names(keys: Sequence[str], calls: Sequence[Any]) -> list[Named]:
    return [
        *(("episode", key) for key in keys),
        # All parts of an episode are one tenant's.
        *(("call", same_tenant(keys[0], str(call["id"]))) for call in calls),
        *(("response", call["response_id"]) for call in calls if call["response_id"] is not None),
    ]


async def rewrite(
    connection: AsyncConnection, driver: Any, ids: Sequence[UUID], calls: Sequence[UUID]
) -> int:
    """Store other episodes' additions to these calls whole; return how many there were."""
    adding = [row[0] for row in await driver.fetch(_ADDING, ids, calls)]
    if not adding:
        return 0
    whole = await whole_calls(connection, adding)
    for call, (request, prompt_ids) in whole.items():
        await driver.execute(_REWRITE, call, request, prompt_ids)
    return len(whole)


def _added(*counts: dict[str, int]) -> dict[str, int]:
    return {table: sum(one[table] for one in counts) for table in counts[0]}
