"""Delete an episode from the ledger, in one transaction.

Two things remain: its row of `episodes` without key, task and rewards, as consumptions and links of
other episodes refer to it, and tombstones of its names. So no policy trains on it twice, no join of
other episodes changes, and nothing of it is stored again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from store.claims import release
from store.database import driver_of
from store.driver import Driver
from store.link.claimable import refresh_policy_rows
from store.link.settle import SETTLE_LOCK
from store.read.episodes import full_texts_of_calls
from store.records import Record
from store.tenants import name_in_same_tenant
from store.tombstones import (
    Named,
    add_tombstones,
    begin_deletion,
    forget_matched,
    forget_unmatched,
    key_once_deleted,
)
from store.values.digests import TWIN_SQL

# `marked`: nothing was recorded under that name, and nothing will be any more.
DeletionState = Literal["deleted", "deleted_before", "marked"]


class Receipt(Record, frozen=True, kw_only=True):
    """The result of deleting one episode.

    Attributes:
        episode: the episode's key, or the name that was asked for if it is not recorded.
        state: whether it was deleted now, or before, or was only marked.
        keys: the keys of all its parts, its own among them; empty unless it was deleted now.
        removed: how many rows of each table, and how many dead letters, were deleted.
        rewritten_calls: how many calls of other episodes were stored as additions to its calls, and
            are stored in full now.
        abandoned_updates: updates that were running and held it; their other episodes are free.
        trained: policy versions whose update was trained on it, ended ones among them.
        carried_by: these versions and all their descendants, but for imported ones and theirs.
        linked: other episodes that repeat some of it, or that it repeats; they are not deleted.
    """

    episode: str
    id: UUID | None = None
    state: DeletionState
    keys: tuple[str, ...] = ()
    removed: Mapping[str, int] = {}
    rewritten_calls: int = 0
    abandoned_updates: tuple[UUID, ...] = ()
    trained: tuple[str, ...] = ()
    carried_by: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()


_TRAINED: Final = """
    SELECT c.policy, u.version
    FROM (
        SELECT episode_id, policy, update_id, trained FROM consumptions
        UNION ALL SELECT episode_id, policy, update_id, trained FROM freed_consumptions) c
    JOIN updates u ON u.id = c.update_id
    WHERE c.episode_id = ANY($1) AND c.trained AND u.version IS NOT NULL
    ORDER BY 1, 2
"""
# The weights of an import come from elsewhere, whatever version it follows.
_CARRIED: Final = f"""
    WITH RECURSIVE carried (policy, version) AS (
        SELECT policy, version FROM ({_TRAINED}) trained
        UNION SELECT u.policy, u.version FROM carried c
            JOIN updates u ON u.policy = c.policy AND u.parent_version = c.version
            WHERE u.version IS NOT NULL AND NOT u.metrics ? 'imported_from')
    SELECT policy, version FROM carried ORDER BY 1, 2
"""
_LINKED: Final = """
    SELECT DISTINCT o.key FROM links l
    JOIN episodes o ON o.id IN (l.needed_by, l.provided_by) AND o.deleted_at IS NULL
    WHERE (l.needed_by = ANY($1) OR l.provided_by = ANY($1)) AND NOT l.too_common
    ORDER BY 1
"""


async def versions_trained_on(driver: Driver, ids: Sequence[UUID]) -> dict[str, Any]:
    """Return the versions `trained` on these episodes, and `carried_by`, as `Receipt` has them."""
    trained = await driver.fetch(_TRAINED, list(ids))
    carried = await driver.fetch(_CARRIED, list(ids)) if trained else []
    return {
        "trained": tuple(f"{policy}@{version}" for policy, version in trained),
        "carried_by": tuple(f"{policy}@{version}" for policy, version in carried),
    }


# Why an update is abandoned.
WHY_ABANDONED: Final = "an episode that it held was deleted"

# Updates that hold the episode must end first. Their episodes are locked, too, in the order of
# keys as everywhere.
_HOLDING_UPDATES: Final = """
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
_JOINED_EPISODE: Final = "SELECT COALESCE(root, id) FROM episodes WHERE key = $1"
_CALLS: Final = "SELECT id, response_id FROM transitions WHERE episode_id = ANY($1)"
# Calls of other episodes that are stored as additions to these calls. Each needs a fingerprint that
# its base provides, in either split's form: by these it is found.
_DEPENDENT_CALLS: Final = f"""
    SELECT t.id FROM transitions t WHERE t.parent_id = ANY($2) AND t.episode_id <> ALL ($1)
        AND t.id IN (
            SELECT n.call_id FROM provided_fingerprints p JOIN needed_fingerprints n
                ON n.digest = ANY(ARRAY[p.digest, {TWIN_SQL.format("p.digest")}])
            WHERE p.episode_id = ANY($1))
"""
_REWRITE: Final = """
    UPDATE transitions SET parent_id = NULL, request_prefix = NULL, request_suffix = NULL,
        prompt_prefix = NULL, request = $2, prompt_ids = $3 WHERE id = $1
"""
# Tables other than `transitions` from which an episode's rows are deleted.
BY_EPISODE: Final = ("judgements", "provided_fingerprints", "needed_fingerprints")
# Parameters: ids of episodes, and the replacements of their keys.
STRIP_EPISODES: Final = """
    UPDATE episodes e SET key = s.key, task = NULL, task_named = false, task_from = NULL,
        joined_task = NULL, scored_at = NULL, call_scored_at = NULL,
        reward = NULL,
        quarantined_reason = 'deleted', deleted_at = now()
    FROM unnest($1::uuid[], $2::text[]) AS s (id, key) WHERE e.id = s.id
"""


async def keep_writers_out(driver: Driver) -> int:
    """Block the storing of records until the transaction ends; return the deletion's number.

    Until then, nothing stored is joined or matched to its target either (`store.link.settle`).
    """
    deletion = await begin_deletion(driver)
    await driver.execute("SELECT pg_advisory_xact_lock($1)", SETTLE_LOCK)
    return deletion


async def delete_episode(connection: AsyncConnection, episode_id: UUID) -> Receipt | None:
    """Delete an episode and all its parts in the caller's transaction.

    Return None if there is no such episode, or if it was deleted before. Until the transaction
    ends, other processes can store no records (`keep_writers_out`).
    """
    driver = await driver_of(connection)
    deletion = await keep_writers_out(driver)
    parts = await driver.fetch(_PARTS, episode_id)
    if not parts:
        return None
    ids, keys = [part["id"] for part in parts], [part["key"] for part in parts]
    abandoned = await abandon_updates(connection, driver, ids, WHY_ABANDONED)
    adapters = await versions_trained_on(driver, ids)
    calls = await driver.fetch(_CALLS, ids)
    rewritten = await rewrite_dependent_calls(connection, driver, ids, [row["id"] for row in calls])
    names = _tombstone_names(keys, calls)
    removed = _sum_counts(await forget_matched(driver, ids), await forget_unmatched(driver, names))
    for table in ("transitions", *BY_EPISODE):
        done = await driver.execute(f"DELETE FROM {table} WHERE episode_id = ANY($1)", ids)
        removed[table] = int(done.rpartition(" ")[2])
    await add_tombstones(driver, names, deletion)
    await driver.execute(STRIP_EPISODES, ids, [key_once_deleted(key) for key in keys])
    await refresh_policy_rows(connection, ids)
    return Receipt(
        episode=next((part["key"] for part in parts if part["is_whole"]), keys[0]),
        id=episode_id,
        state="deleted",
        keys=tuple(keys),
        removed=removed,
        rewritten_calls=rewritten,
        abandoned_updates=abandoned,
        linked=tuple(row[0] for row in await driver.fetch(_LINKED, ids)),
        **adapters,
    )


async def mark_deleted(connection: AsyncConnection, key: str) -> Receipt:
    """Keep an episode's key from being recorded later, in the caller's transaction.

    If an episode with this key has been stored meanwhile, it is deleted.
    """
    driver = await driver_of(connection)
    deletion = await begin_deletion(driver)
    # The episode may have been stored since the caller looked for it.
    if (whole := await driver.fetchval(_JOINED_EPISODE, key)) is not None:
        receipt = await delete_episode(connection, whole)
        assert receipt is not None
        return receipt
    names: list[Named] = [("episode", key)]
    await add_tombstones(driver, names, deletion)
    return Receipt(episode=key, state="marked", removed=await forget_unmatched(driver, names))


async def receipt_of_deleted(connection: AsyncConnection, name: str, episode_id: UUID) -> Receipt:
    """Return a receipt for an episode that was deleted before, with the versions trained on it."""
    driver = await driver_of(connection)
    parts = await driver.fetch("SELECT id FROM episodes WHERE id = $1 OR root = $1", episode_id)
    adapters = await versions_trained_on(driver, [row[0] for row in parts])
    return Receipt(episode=name, id=episode_id, state="deleted_before", **adapters)


async def abandon_updates(
    connection: AsyncConnection, driver: Driver, ids: Sequence[UUID], why: str
) -> tuple[UUID, ...]:
    """Lock the episodes, and abandon the running updates that hold any; return the updates' ids."""
    before_lock = [row[0] for row in await driver.fetch(_HOLDING_UPDATES, ids)]
    await driver.execute(_LOCK, ids, before_lock)
    # Read again: an update may have ended, and another begun, during the wait for the locks.
    holding = [row[0] for row in await driver.fetch(_HOLDING_UPDATES, ids)]
    for update_id in holding:
        await release(connection, update_id, why)
    return tuple(holding)


def _tombstone_names(keys: Sequence[str], calls: Sequence[Any]) -> list[Named]:
    return [
        *(("episode", key) for key in keys),
        # All parts of an episode are one tenant's.
        *(("call", name_in_same_tenant(keys[0], str(call["id"]))) for call in calls),
        *(("response", call["response_id"]) for call in calls if call["response_id"] is not None),
    ]


async def rewrite_dependent_calls(
    connection: AsyncConnection, driver: Driver, ids: Sequence[UUID], calls: Sequence[UUID]
) -> int:
    """Store in full the calls of other episodes that are stored as additions to `calls`.

    Afterwards `calls` can be deleted. `ids` are their episodes. Return how many were rewritten.
    """
    dependent = [row[0] for row in await driver.fetch(_DEPENDENT_CALLS, ids, calls)]
    if not dependent:
        return 0
    texts_by_call = await full_texts_of_calls(connection, dependent)
    for call, (request, prompt_ids) in texts_by_call.items():
        await driver.execute(_REWRITE, call, request, prompt_ids)
    return len(texts_by_call)


def _sum_counts(*counts: dict[str, int]) -> dict[str, int]:
    return {table: sum(one[table] for one in counts) for table in counts[0]}
