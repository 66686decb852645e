"""Ingest spooled records: one transaction per batch, and a second if records refer to others.

Storing is idempotent and independent of order: every row has the id that its record was made
with, an episode's fields are merged by rules that commute, and a reference to something that
is not stored yet (feedback, a call that repeats another's reply) is resolved whenever its
target arrives (docs/decisions/001-order-free-ledger.md).

The first transaction writes a batch's rows by COPY, on the driver's own connection. Row locks are
taken in the order of episode keys, so that drainers cannot deadlock. A call that is stored already
shows as a violation of its primary key. That is rare, so only then the batch is written again,
after a query for the calls that are stored.

Only the second transaction (`store.link.settle`) reads what other drainers wrote. By then both
sides of a reference are committed, so the later of two drainers sees them.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from uuid import UUID

import asyncpg
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import idle_driver_of, prevents_all_storing
from store.driver import Driver
from store.errors import RecordRefused
from store.ids import days_of, time_of
from store.link.claimable import add_policy_rows
from store.link.joins import DOUBTFUL_CALL
from store.link.outages import quarantine_for_gaps, store_outages
from store.link.settle import (
    WrittenBatch,
    may_have_references,
    quarantine_in_outages,
    resolve_references,
)
from store.records import (
    EVAL,
    OWN_EPISODE,
    TRAIN,
    CallRecord,
    FeedbackRecord,
    GapRecord,
    OutageRecord,
    Split,
    SpoolRecord,
)
from store.schema.partitions import ensure_partition
from store.tombstones import admit_records
from store.values.digests import as_uuid, digest_levels
from store.write.bases import BaseCache
from store.write.rows import (
    EVENT_COLUMNS,
    FEEDBACK_COLUMNS,
    TRANSITION_COLUMNS,
    QuestionDigest,
    Row,
    episode_row,
    event_row,
    feedback_row,
    no_question,
    storable_call,
    transition_row,
)

# A named task beats a derived one; among equals the earliest call's task counts. Method and policy
# are the earliest call's, too. Of two reasons to exclude an episode the lesser text counts. So the
# result does not depend on the order of arrival.
_TAKES_TASK = (
    "excluded.task IS NOT NULL AND (episodes.task IS NULL"
    " OR (excluded.task_named AND NOT episodes.task_named)"
    " OR (excluded.task_named = episodes.task_named"
    " AND excluded.task_from < episodes.task_from))"
)
_IS_EARLIER = "excluded.first_call_id < episodes.first_call_id"
_UPSERT_EPISODES = f"""
    INSERT INTO episodes (id, key, method, task, task_named, task_from, policy, policy_version,
                          first_call_id, last_call_id, last_call_at, failed, doubtful,
                          split, quarantined_reason)
    SELECT id, key, method, task, task_named, task_from, policy, policy_version, id,
        last_call_id, last_call_at, failed, doubtful, split,
        CASE WHEN doubtful THEN '{DOUBTFUL_CALL}' END
    FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::boolean[], $6::uuid[],
                $7::text[], $8::integer[], $9::uuid[], $10::timestamptz[], $11::boolean[],
                $12::boolean[], $13::text[])
        AS said (id, key, method, task, task_named, task_from, policy, policy_version,
                 last_call_id, last_call_at, failed, doubtful, split)
    ON CONFLICT (key) DO UPDATE SET
        last_call_at = GREATEST(episodes.last_call_at, excluded.last_call_at),
        first_call_id = LEAST(episodes.first_call_id, excluded.first_call_id),
        last_call_id = GREATEST(episodes.last_call_id, excluded.last_call_id),
        failed = CASE WHEN excluded.last_call_id > episodes.last_call_id THEN excluded.failed
                 ELSE episodes.failed END,
        method = CASE WHEN {_IS_EARLIER} THEN excluded.method ELSE episodes.method END,
        task = CASE WHEN {_TAKES_TASK} THEN excluded.task ELSE episodes.task END,
        task_from = CASE WHEN {_TAKES_TASK} THEN excluded.task_from ELSE episodes.task_from END,
        task_named = episodes.task_named OR excluded.task_named,
        policy = CASE WHEN {_IS_EARLIER} THEN excluded.policy ELSE episodes.policy END,
        policy_version = CASE WHEN {_IS_EARLIER} THEN excluded.policy_version
                         ELSE episodes.policy_version END,
        doubtful = episodes.doubtful OR excluded.doubtful,
        split = CASE WHEN excluded.split = '{EVAL}' THEN '{EVAL}' ELSE episodes.split END,
        quarantined_reason = LEAST(episodes.quarantined_reason, excluded.quarantined_reason)
    RETURNING key, id, linked, xmax <> 0 AS was_there, first_call_id, last_call_at
"""

_INSERT_REQUESTS = """
    INSERT INTO feedback_requests (id, idempotency_key, body_hash, at, api_key)
    SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::timestamptz[], $5::text[])
    ON CONFLICT DO NOTHING RETURNING id
"""


async def write_records(
    driver: Driver,
    records: Sequence[SpoolRecord],
    bases: BaseCache,
    question_digest: QuestionDigest = no_question,
    *,
    repeated: bool,
) -> WrittenBatch:
    """Write `records` in the driver's current transaction.

    `repeated` means that some may be stored already; these are not changed. From the result of
    `question_digest` the task of an episode without a named task is derived.

    Raises:
        asyncpg.UniqueViolationError: some are stored already, and `repeated` is false.
        asyncpg.PostgresError: the database is unavailable, or refuses a record.
    """
    calls = {
        record.id: storable_call(record) for record in records if isinstance(record, CallRecord)
    }
    statements = {record.id: record for record in records if isinstance(record, FeedbackRecord)}
    written = WrittenBatch()
    if calls:
        known = set[UUID]()
        if repeated:
            query = "SELECT id FROM transitions WHERE id = ANY($1)"
            known = {row[0] for row in await driver.fetch(query, list(calls))}
        await _place_calls(driver, list(calls.values()), question_digest, written)
        await _write_calls(driver, known, bases, written)
    gaps = [record for record in records if isinstance(record, GapRecord)]
    if gaps:
        written.linked += await quarantine_for_gaps(driver, gaps)
    outages = [record for record in records if isinstance(record, OutageRecord)]
    if outages:
        written.outages += await store_outages(driver, outages)
    if statements:
        pending = list(statements.values())
        written.keyed += await _write_feedback(driver, pending)
        written.rescored += await _backdate_duplicates(
            driver, [one for one in pending if one.idempotency_key]
        )
        written.statements += statements.values()
    return written


async def _place_calls(
    driver: Driver, calls: list[CallRecord], question_digest: QuestionDigest, written: WrittenBatch
) -> None:
    """Write the calls' episodes and policy rows; add the calls to `written`."""
    episode_ids, changed = await _upsert_episodes(driver, calls, question_digest, written)
    written.calls += [(call, episode_ids[call.episode]) for call in calls]
    for call in calls:
        other: Split = TRAIN if call.split == EVAL else EVAL
        written.provided += [
            (as_uuid(digest, call.split), as_uuid(digest, other)) for digest in call.provides
        ]
    await add_policy_rows(driver, written.calls, changed)


async def _write_calls(
    driver: Driver, known: set[UUID], bases: BaseCache, written: WrittenBatch
) -> None:
    """Write the rows of the calls in `written` that are not `known`."""
    new = written.calls
    if known:
        new = [(call, episode) for call, episode in new if call.id not in known]
    # A generator, so that each row is in memory only until it is sent.
    rows = (transition_row(call, episode, bases.store(call)) for call, episode in new)
    provided = [
        (as_uuid(digest, call.split), episode) for call, episode in new for digest in call.provides
    ]
    needed = [
        (as_uuid(digest, call.split), call.id, episode, level)
        for call, episode in new
        for digest, level in digest_levels(call.needs)
    ]
    events = [
        event_row(event, time_of(call.id), episode_id=episode)
        for call, episode in new
        for event in call.tool_events
    ]
    if new:
        await driver.copy_records_to_table("transitions", columns=TRANSITION_COLUMNS, records=rows)
    await _copy(driver, "provided_fingerprints", ("digest", "episode_id"), provided)
    columns = ("digest", "call_id", "episode_id", "level")
    await _copy(driver, "needed_fingerprints", columns, needed)
    await _copy(driver, "tool_events", EVENT_COLUMNS, events)


async def _upsert_episodes(
    driver: Driver,
    calls: Sequence[CallRecord],
    question_digest: QuestionDigest,
    written: WrittenBatch,
) -> tuple[dict[str, UUID], list[UUID]]:
    """Write the calls' episodes; return their ids by key, and the ids of old unlinked ones.

    `store.link.settle` refreshes the rows of linked ones in `episode_policies` later.
    """
    by_key: dict[str, list[CallRecord]] = {}
    for call in sorted(calls, key=lambda call: (call.episode, call.id)):
        by_key.setdefault(call.episode, []).append(call)
    rows = [episode_row(calls, question_digest) for calls in by_key.values()]
    columns = zip(*rows, strict=True)
    upserted = await driver.fetch(_UPSERT_EPISODES, *map(list, columns))
    written.span = (min(row[4] for row in upserted), max(row[5] for row in upserted))
    for key, episode_id, linked, was_there, *_ in upserted:
        if linked:
            written.linked.append(episode_id)
        elif was_there and by_key[key][0].method == OWN_EPISODE:
            written.rescored.append(episode_id)
    ids = {row[0]: row[1] for row in upserted}
    return ids, [row[1] for row in upserted if row[3] and not row[2]]


async def _copy(driver: Driver, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    if rows:
        await driver.copy_records_to_table(table, columns=columns, records=rows)


# Requests whose key is stored with another body, too. Of two in one batch, the later one conflicts.
_CONFLICTS = """
    SELECT n.id FROM feedback_requests n WHERE n.id = ANY($1) AND EXISTS (
        SELECT FROM feedback_requests o
        WHERE o.idempotency_key = n.idempotency_key AND o.body_hash <> n.body_hash
            AND (o.id < n.id OR o.id <> ALL ($1)))
"""


async def _write_feedback(driver: Driver, records: Sequence[FeedbackRecord]) -> list[UUID]:
    """Write feedback requests and their items; return the ids of new requests with a key.

    A request whose idempotency key and body are stored already is skipped; a request with the same
    key and another body is written.
    """
    ordered = sorted(records, key=lambda record: (record.idempotency_key or "", record.id))
    rows = [(r.id, r.idempotency_key, r.body_hash, r.at, r.api_key) for r in ordered]
    inserted = await driver.fetch(_INSERT_REQUESTS, *map(list, zip(*rows, strict=True)))
    new = {row[0] for row in inserted}
    statements, events = [], []
    for record in records:
        for item in record.items if record.id in new else ():
            if item.tool is None:
                statements.append(feedback_row(item, record))
            else:
                events.append(event_row(item.tool, record.at, item=item))
    await _copy(driver, "feedback", FEEDBACK_COLUMNS, statements)
    await _copy(driver, "tool_events", EVENT_COLUMNS, events)
    return [record.id for record in records if record.id in new and record.idempotency_key]


# A proxy that does not know of a request accepts it again, and the repetition may be stored first.
# The earliest time counts: otherwise the request would count after a statement that corrected it.
_BACKDATE = """
    WITH said AS (
        SELECT q.id, min(s.at) AS at
        FROM unnest($1::text[], $2::text[], $3::timestamptz[]) AS s (key, hash, at)
            JOIN feedback_requests q ON (q.idempotency_key, q.body_hash) = (s.key, s.hash)
        GROUP BY q.id),
    earlier AS (
        UPDATE feedback_requests q SET at = said.at
        FROM said WHERE q.id = said.id AND q.at > said.at RETURNING q.id, q.at)
    UPDATE feedback f SET at = earlier.at FROM earlier WHERE f.request_id = earlier.id
    RETURNING f.episode_id
"""


async def _backdate_duplicates(driver: Driver, records: Sequence[FeedbackRecord]) -> list[UUID]:
    """Backdate stored duplicates to the first request; return the episodes they are about."""
    if not records:
        return []
    columns = zip(*[(one.idempotency_key, one.body_hash, one.at) for one in records], strict=True)
    rows = await driver.fetch(_BACKDATE, *map(list, columns))
    return [row[0] for row in rows if row[0] is not None]


class Ingester:
    """Stores the batches of one drainer, and caches the calls that later calls may add to."""

    def __init__(
        self,
        on_conflicts: Callable[[list[UUID]], None] | None = None,
        on_late: Callable[[Mapping[str, int]], None] | None = None,
        question_digest: QuestionDigest = no_question,
    ) -> None:
        """Store the callbacks.

        Args:
            on_conflicts: gets the ids of feedback requests whose idempotency key was stored with
                another body; the feedback of both bodies counts.
            on_late: gets, by policy, how many statements came after an update had claimed their
                episode and trained on it.
            question_digest: digests the question of a call, by which episodes without a named task
                are grouped. It is called only for calls that an episode's task may come from.
        """
        self._on_conflicts = on_conflicts
        self._on_late = on_late
        self._question_digest = question_digest
        self._bases = BaseCache()
        self._days: set[date] = set()
        # The number of the last deletion before the calls in `_bases` were stored.
        self._deletion = 0

    async def store(self, engine: AsyncEngine, records: Sequence[SpoolRecord]) -> frozenset[UUID]:
        """Store all `records` or none; those that are stored already change nothing.

        Return the ids of the records that were left out, because they are about deleted episodes
        only, or calls of days that were dropped. After any error the batch may be stored again,
        whole or in halves.

        Raises:
            RecordRefused: the database refuses a record.
            Exception: the database accepts no record now (`store.database.prevents_all_storing`),
                or the error is unexpected: a record may be its cause.
        """
        try:
            return await self._store(engine, records)
        except (
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            SQLAlchemyError,
            ArithmeticError,
            ValueError,
        ) as error:
            # An internal error of PostgreSQL, as of a damaged index, is not a record's fault.
            if prevents_all_storing(error) or isinstance(error, asyncpg.InternalServerError):
                raise
            raise RecordRefused(str(error)) from error

    async def _store(self, engine: AsyncEngine, records: Sequence[SpoolRecord]) -> frozenset[UUID]:
        calls = [record.id for record in records if isinstance(record, CallRecord)]
        for repeated in (False, True):
            # In transactions of their own, so that no drainer holds row locks while it waits here.
            for day in sorted({*days_of(calls)} - self._days):
                async with engine.begin() as connection:
                    await ensure_partition(connection, day)
                self._days.add(day)
            try:
                async with engine.connect() as connection:
                    return await self._store_on(await idle_driver_of(connection), records, repeated)
            except (asyncpg.UniqueViolationError, asyncpg.CheckViolationError):
                # Some records are stored already, or a day's partition was dropped. Both are rare,
                # so the next try looks for them.
                if repeated:
                    raise
                self._days.clear()
        raise AssertionError("unreachable: the second try returns or raises")

    async def _store_on(
        self, driver: Driver, records: Sequence[SpoolRecord], repeated: bool
    ) -> frozenset[UUID]:
        # If the transaction fails, its calls are not stored: none of them may stay a base.
        bases, self._bases = self._bases, BaseCache()
        async with driver.transaction():
            admitted = await admit_records(driver, records)
            if admitted.deletion != self._deletion:
                # The base of a later call may be gone.
                bases, self._deletion = BaseCache(), admitted.deletion
            written = await write_records(
                driver, admitted.records, bases, self._question_digest, repeated=repeated
            )
        self._bases = bases
        # After the commit: of two batches at the same time, at least the later sees the other.
        conflicts = await driver.fetch(_CONFLICTS, written.keyed) if written.keyed else []
        if conflicts and self._on_conflicts is not None:
            self._on_conflicts([row[0] for row in conflicts])
        if await may_have_references(driver, written):
            async with driver.transaction():
                late = await resolve_references(driver, written)
            if late and self._on_late is not None:
                self._on_late(late)
        # An outage of days has many episodes: other drainers' batches are stored in between.
        more = bool(written.outages)
        while more:
            async with driver.transaction():
                more = await quarantine_in_outages(driver, written.outages)
        return admitted.left_out
