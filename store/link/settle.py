"""Resolve references: feedback to its target, and calls to the calls that they repeat.

An advisory lock allows one transaction at a time. Most batches refer to nothing and nothing refers
to them: for these `may_have_references` returns False, and no transaction is needed. Every result
is computed from all that is stored, so that neither the order of arrival nor a repetition changes
it (docs/decisions/012-identity.md).
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final
from uuid import UUID

import msgspec

from store.driver import Driver
from store.link.claimable import (
    count_late_feedback,
    refresh_with_wholes,
    score_episodes,
    share_policies,
)
from store.link.joins import MOST_PROVIDERS, EpisodePart, Link, resolve_joins
from store.link.outages import (
    EPISODES_IN_OUTAGE,
    Span,
    find_in_outage,
    find_under_way,
    quarantine_for_outage,
)
from store.questions import Target, stored_targets
from store.records import EVAL, OWN_EPISODE, CallRecord, FeedbackRecord
from store.tenants import name_in_same_tenant
from store.values.digests import MATCHES_SQL

# Key of the advisory lock that `resolve_references` holds until its transaction ends.
SETTLE_LOCK: Final = 0x5041574D
# All statements here look single rows up. If most calls are equal, statistics say that a digest has
# most rows, and PostgreSQL would otherwise read the whole table.
_BY_INDEX: Final = "SET LOCAL enable_seqscan = off"


class WrittenBatch(msgspec.Struct):
    """The records of a written batch that refer to other records, or may be referred to.

    `calls` are pairs of a call and its episode's id; `provided` are the fingerprints that the calls
    provide: pairs of the stored digest and its twin in the other split.
    """

    calls: list[tuple[CallRecord, UUID]] = []
    provided: list[tuple[UUID, UUID]] = []
    statements: list[FeedbackRecord] = []
    # Episodes that are linked to others already.
    linked: list[UUID] = []
    # Episodes whose scores must be computed again, because their first call may have changed.
    rescored: list[UUID] = []
    # Feedback requests that have an idempotency key.
    keyed: list[UUID] = []
    # The time span of the calls' episodes, and the ids of the outages in the batch.
    span: Span | None = None
    outages: list[UUID] = []

    def episodes(self) -> list[UUID]:
        """Return the episodes of the batch's calls."""
        return list({episode_id for _, episode_id in self.calls})

    def calls_with_needs(self) -> list[UUID]:
        """Return the ids of the batch's calls that need fingerprints."""
        return [call.id for call, _ in self.calls if call.needs]

    def targets(self) -> list[Target]:
        """Return the batch's episodes, calls and responses, as targets that feedback may name."""
        targets = []
        for call, episode_id in self.calls:
            targets.append(Target("episode", call.episode, episode_id, None))
            name = name_in_same_tenant(call.episode, str(call.id))
            targets.append(Target("call", name, episode_id, call.id))
            if call.response_id is not None:
                targets.append(Target("response", call.response_id, episode_id, call.id))
        return targets


_IS_REFERRED_TO = f"""
    SELECT EXISTS (SELECT FROM needed_fingerprints WHERE digest = ANY($4))
        OR EXISTS (SELECT FROM feedback WHERE episode_id IS NULL)
        OR EXISTS (SELECT FROM tool_events WHERE episode_id IS NULL)
        OR EXISTS ({EPISODES_IN_OUTAGE})
"""


async def may_have_references(driver: Driver, written: WrittenBatch) -> bool:
    """Return whether the batch may refer to stored records, or be referred to by them."""
    if written.statements or written.linked or written.rescored or written.calls_with_needs():
        return True
    if written.span is None:
        return False
    provided = list(chain.from_iterable(written.provided))
    async with driver.transaction():
        await driver.execute(_BY_INDEX)
        return bool(
            await driver.fetchval(_IS_REFERRED_TO, written.episodes(), *written.span, provided)
        )


async def resolve_references(driver: Driver, written: WrittenBatch) -> dict[str, int]:
    """Resolve references between the batch and all stored records, in the current transaction.

    It links feedback to targets, joins episodes, quarantines those with a call in an outage, and
    computes the scores of all affected episodes. Return, by policy, how many of the statements came
    too late to be trained on.

    Raises:
        asyncpg.PostgresError: the database is unavailable.
    """
    await _wait_for_turn(driver)
    matched = await _match_feedback(driver, written)
    rescored = {*written.rescored, *matched.values()}
    in_outage = await find_in_outage(driver, written.episodes(), written.span)
    await _recompute(driver, rescored, await _store_links(driver, written), in_outage)
    return await count_late_feedback(driver, list(matched)) if matched else {}


async def quarantine_in_outages(driver: Driver, outages: Sequence[UUID]) -> bool:
    """Quarantine some episodes under way in these outages; return False if none were left."""
    await _wait_for_turn(driver)
    in_outage = await find_under_way(driver, outages)
    await _recompute(driver, set(), set(), in_outage)
    return bool(in_outage)


async def _wait_for_turn(driver: Driver) -> None:
    """Take the settle lock: only one transaction at a time resolves references."""
    await driver.execute(_BY_INDEX)
    await driver.execute("SELECT pg_advisory_xact_lock($1)", SETTLE_LOCK)


async def _recompute(
    driver: Driver, rescored: set[UUID], joined: set[UUID], in_outage: Mapping[UUID, bool]
) -> None:
    """Quarantine the episodes `in_outage`; recompute joins, scores and rows of all affected."""
    ends = joined | {one for one, is_linked in in_outage.items() if is_linked}
    linked = {row[0] for row in await driver.fetch(_REACHED, list(ends))} if ends else set[UUID]()
    touched = {*rescored, *linked, *in_outage}
    if not touched:
        return
    await _lock_episodes(driver, touched)
    if in_outage:
        await quarantine_for_outage(driver, list(in_outage))
    if linked:
        await _update_joins(driver, linked)
    await score_episodes(driver, [*rescored, *linked])
    if linked:
        await share_policies(driver, linked)
    await refresh_with_wholes(driver, touched)


# Feedback


_MATCH = """
    UPDATE {table} f SET episode_id = t.episode_id, {call} = t.call_id
    FROM unnest($1::text[], $2::text[], $3::uuid[], $4::uuid[])
        AS t (kind, name, episode_id, call_id)
    WHERE f.episode_id IS NULL AND f.target_kind = t.kind AND f.target = t.name
    RETURNING f.id, f.episode_id
"""


async def _match_feedback(driver: Driver, written: WrittenBatch) -> dict[UUID, UUID]:
    """Link feedback and tool events to stored targets; return the feedback's ids and episodes."""
    wanted = {
        (item.target_kind, item.target) for record in written.statements for item in record.items
    }
    targets = {*written.targets(), *await stored_targets(driver, wanted)}
    if not targets:
        return {}
    ordered = sorted(targets, key=lambda target: (target.kind, target.name, str(target.call_id)))
    columns = [list(column) for column in zip(*ordered, strict=True)]
    matched = await driver.fetch(_MATCH.format(table="feedback", call="call_id"), *columns)
    await driver.execute(_MATCH.format(table="tool_events", call="asked_by"), *columns)
    return {row[0]: row[1] for row in matched}


# Joins

# Only the surest level of a call counts, so no others are linked. For a digest that more than
# MOST_PROVIDERS episodes provide, one link above that number is made: enough to see that it is too
# common. Each split's digests are counted apart, and those of the other split are the least sure.
_LINK = f"""
    INSERT INTO links (call_id, level, provided_by, needed_by)
    SELECT DISTINCT call_id, level, provided_by, needed_by FROM (
        SELECT n.call_id, d.level, p.episode_id AS provided_by, n.episode_id AS needed_by,
            min(d.level) OVER (PARTITION BY n.call_id) AS surest
        FROM needed_fingerprints n CROSS JOIN LATERAL {MATCHES_SQL} CROSS JOIN LATERAL (
            SELECT DISTINCT episode_id FROM (
                SELECT episode_id FROM provided_fingerprints WHERE digest = d.digest
                LIMIT {64 * MOST_PROVIDERS}) provided
            WHERE episode_id <> n.episode_id LIMIT {MOST_PROVIDERS + 1}) p
        WHERE (n.digest = ANY($1) OR n.call_id = ANY($2)) AND d.counts
            AND NOT EXISTS (SELECT FROM links l WHERE l.call_id = n.call_id
                            AND (l.level < d.level OR l.level = d.level AND l.too_common))) found
    WHERE level = surest
    ON CONFLICT DO NOTHING RETURNING call_id, level, provided_by
"""
# Digests that are too common for every call that needs them: enough episodes provide them even
# without the call's own.
_COMMON = f"""
    SELECT digest FROM unnest($1::uuid[]) AS d (digest) WHERE {MOST_PROVIDERS + 1} < (
        SELECT count(DISTINCT episode_id) FROM (
            SELECT episode_id FROM provided_fingerprints WHERE digest = d.digest
            LIMIT {64 * MOST_PROVIDERS}) provided)
"""
_KNOWN_COMMON = "SELECT digest FROM common_fingerprints WHERE digest = ANY($1)"
_STORE_COMMON = "INSERT INTO common_fingerprints SELECT unnest($1::uuid[]) ON CONFLICT DO NOTHING"
_MARK_TOO_COMMON = f"""
    UPDATE links SET too_common = true WHERE (call_id, level) IN (
        SELECT call_id, level FROM links WHERE call_id = ANY($1)
        GROUP BY 1, 2 HAVING count(*) > {MOST_PROVIDERS})
"""
_LINKED = (
    "SELECT call_id, level, provided_by, needed_by, too_common FROM links WHERE call_id = ANY($1)"
)
# These episodes and all that can be reached from them through links, or were joined with them.
_REACHED = """
    WITH RECURSIVE reached (id) AS (
        SELECT unnest($1::uuid[])
        UNION
        SELECT other.id FROM reached r CROSS JOIN LATERAL (
            SELECT provided_by FROM links WHERE needed_by = r.id AND NOT too_common
            UNION ALL SELECT needed_by FROM links WHERE provided_by = r.id AND NOT too_common
            UNION ALL SELECT root FROM episodes WHERE id = r.id AND root IS NOT NULL
            UNION ALL SELECT id FROM episodes WHERE root = r.id) other (id))
    SELECT id FROM reached
"""


async def _store_links(driver: Driver, written: WrittenBatch) -> set[UUID]:
    """Link calls to the episodes that provide what they need; return the affected episodes.

    The call or the provider is in the batch. Calls that need a common digest are looked up only
    once, so that a call is stored as fast after half a million equal ones as after none.
    """
    stored = list({digest for digest, _ in written.provided})
    common = {row[0] for row in await driver.fetch(_COMMON, stored)} if stored else set[UUID]()
    known = (
        {row[0] for row in await driver.fetch(_KNOWN_COMMON, list(common))} if common else common
    )
    provided = {*chain.from_iterable(pair for pair in written.provided if pair[0] not in known)}
    rows = await driver.fetch(_LINK, list(provided), written.calls_with_needs())
    if common - known:
        await driver.execute(_STORE_COMMON, list(common - known))
    if not rows:
        return set(written.linked)
    calls, new = list({row[0] for row in rows}), {tuple(row) for row in rows}
    await driver.execute(_MARK_TOO_COMMON, calls)
    ends = set(written.linked)
    for *link, needed_by, too_common in await driver.fetch(_LINKED, calls):
        ends.add(needed_by)
        # A too common need says nothing about its providers, but an earlier link of it has to be
        # taken back.
        if not too_common or tuple(link) not in new:
            ends.add(link[-1])
    return ends


async def _lock_episodes(driver: Driver, episodes: set[UUID]) -> None:
    """Lock these episodes and their roots in the order of keys, as `store.write.ingest` does."""
    await driver.execute(
        "SELECT FROM episodes WHERE id = ANY (ARRAY("
        " SELECT unnest($1::uuid[]) UNION SELECT root FROM episodes WHERE id = ANY($1)))"
        " ORDER BY key FOR NO KEY UPDATE",
        list(episodes),
    )


_PARTS = """
    SELECT e.id, e.first_call_id, e.task, e.task_named, e.task_from, e.doubtful, e.split, e.root,
        EXISTS (SELECT FROM episode_policies p
                WHERE p.episode_id = COALESCE(e.root, e.id) AND p.claimed_by IS NOT NULL)
            OR e.deleted_at IS NOT NULL AS held
    FROM episodes e WHERE e.id = ANY($1)
"""
_LINKS = "SELECT call_id, level, needed_by, provided_by FROM links WHERE needed_by = ANY($1)"
_PLACE = """
    UPDATE episodes e SET linked = true, root = p.root, joined_task = p.joined_task,
        quarantined_reason = p.quarantined_reason
    FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[])
        AS p (id, root, joined_task, quarantined_reason)
    WHERE e.id = p.id AND (e.linked, e.root, e.joined_task, e.quarantined_reason)
        IS DISTINCT FROM (true, p.root, p.joined_task, p.quarantined_reason)
"""
# Held episodes too: an update that holds one may still give it up (`store.claims.record_update`).
_SPLIT = f"""
    UPDATE episodes e SET joined_split = s.split
    FROM (SELECT id, CASE WHEN id = ANY($2) THEN '{EVAL}' END AS split FROM unnest($1::uuid[]) id) s
    WHERE e.id = s.id AND e.joined_split IS DISTINCT FROM s.split
"""
_UPDATE_CALLS = """
    UPDATE transitions t SET method = j.method, confidence = j.confidence
    FROM unnest($1::uuid[], $2::text[], $3::text[]) AS j (id, method, confidence)
    WHERE t.id = j.id AND (t.method, t.confidence) IS DISTINCT FROM (j.method, j.confidence)
"""


async def _update_joins(driver: Driver, linked: set[UUID]) -> None:
    """Update these episodes and their calls to the result of `store.link.joins.resolve_joins`."""
    ids = list(linked)
    parts = [EpisodePart(**dict(row)) for row in await driver.fetch(_PARTS, ids)]
    links = [Link(**dict(row)) for row in await driver.fetch(_LINKS, ids)]
    joins = resolve_joins(parts, links)
    places = [(part, *msgspec.structs.astuple(place)) for part, place in joins.places.items()]
    if places:
        await driver.execute(_PLACE, *map(list, zip(*places, strict=True)))
    await driver.execute("UPDATE episodes SET linked = true WHERE id = ANY($1) AND NOT linked", ids)
    await driver.execute(_SPLIT, ids, list(joins.evaluation))
    calls = [(call, *(joined or (OWN_EPISODE, "doubtful"))) for call, joined in joins.calls.items()]
    if calls:
        await driver.execute(_UPDATE_CALLS, *map(list, zip(*calls, strict=True)))
