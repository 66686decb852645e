"""Find the episodes that wait for a judge or a person, and record how judging ended.

A judge's scores are stored as feedback. The table `judgements` records that a judge was asked, so
that Pawl does not ask again and again after a restart, or after an answer without a score. An
episode that could not be judged waits again once it has a later call.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import Row, Text, and_, cast, delete, func, or_, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.ids import lowest_id_at, time_of
from store.read.browsing import IS_OF_TENANT
from store.read.episodes import is_of_tenant
from store.read.lines import QUIET_PERIOD
from store.records import Record
from store.schema.tables import episode_policies, episodes, feedback, judgements
from store.selecting import Selection, selection_query
from store.tenants import bare, scoped, tenant_of
from store.values.rewards import LARGEST, TERMS_OF_POLICY

Outcome = Literal["judged", "cannot_tell", "failed"]
# An episode of the last day is compared with facts about it, and an attempt at a task with others
# that began at most so long before it, or later.
COMPARED_WITHIN: Final = timedelta(days=1)


class AwaitingEpisode(Record, frozen=True, kw_only=True):
    """An episode that waits for a judge.

    `outcome` is that of the judge's last try (None: there was none), and `times` how often in a
    row the judge tried since the episode's last call, each time with this outcome.
    """

    episode_id: UUID
    times: int
    outcome: Outcome | None


class Judgement(Record, frozen=True, kw_only=True):
    """The result of asking a judge about an episode.

    `due_at` is the time to ask again; None: not before the episode has a further call.
    """

    episode_id: UUID
    judge: str
    outcome: Outcome
    attempts: int
    # The time of the last call that the judge was shown.
    last_call_at: datetime
    reason: str | None = None
    due_at: datetime | None = None


async def episodes_awaiting_judge(
    connection: AsyncConnection,
    judge: str,
    selection: Selection,
    *,
    now: datetime,
    quiet_since: datetime,
    compared: float = 0.0,
    limit: int,
) -> list[AwaitingEpisode]:
    """Return at most `limit` episodes of a selection that wait for `judge`, oldest first.

    An episode waits if it has no score, or only opinions, and a policy may still claim it; or if it
    has no score, and no policy to claim it. To measure the judge, the share `compared` (0 to 1) of
    the last day's episodes with a fact waits, too. Left out are quarantined episodes, those with a
    call since `quiet_since`, those that `judge` has scored, and those that it could not score and
    is to retry only after `now` or a further call.
    """
    part = episodes.alias("part")
    of_parts = select(func.max(part.c.last_call_at)).where(part.c.root == episodes.c.id)
    last_call = func.greatest(episodes.c.last_call_at, of_parts.scalar_subquery())
    claims = select(episode_policies).where(episode_policies.c.episode_id == episodes.c.id)
    statements = select(feedback).where(feedback.c.episode_id == episodes.c.id)
    facts = statements.where(
        feedback.c.source.is_(None),
        or_(feedback.c.value.is_not(None), feedback.c.label.is_not(None)),
    )
    opinions = statements.where(feedback.c.source.is_not(None))
    only_opinions = and_(opinions.exists(), ~facts.exists())
    free = claims.where(episode_policies.c.claimed_by.is_(None))
    waits = or_(
        and_(~claims.exists(), episodes.c.scored_at.is_(None)),
        free.where(episode_policies.c.scored_at.is_(None)).exists(),
        and_(free.exists(), only_opinions),
    )
    drawn = func.mod(func.hashtextextended(cast(episodes.c.id, Text), 0), 1000)
    is_compared = and_(
        func.abs(drawn) < 1000 * compared, last_call > now - COMPARED_WITHIN, facts.exists()
    )
    earlier = judgements.alias("asked")
    has_new_calls = earlier.c.last_call_at < last_call
    query = (
        selection_query(selection)
        .outerjoin(earlier, and_(earlier.c.episode_id == episodes.c.id, earlier.c.judge == judge))
        .add_columns(earlier.c.attempts, earlier.c.outcome, has_new_calls.label("has_new_calls"))
        .where(
            or_(waits, is_compared),
            episodes.c.quarantined_reason.is_(None),
            last_call < quiet_since,
            or_(
                earlier.c.episode_id.is_(None),
                and_(earlier.c.outcome != "judged", earlier.c.due_at <= now),
                and_(earlier.c.outcome != "judged", has_new_calls),
            ),
        )
        .limit(limit)
    )
    rows = await connection.execute(query)
    return [
        AwaitingEpisode(
            episode_id=row.id,
            times=0 if row.has_new_calls else row.attempts or 0,
            outcome=row.outcome,
        )
        for row in rows
    ]


async def attempts_at_task(
    connection: AsyncConnection, key: str, *, quiet_since: datetime, most: int
) -> list[UUID]:
    """Return the newest episodes of one task that had their last call before `quiet_since`.

    The task is that of the episode with the stored key `key`. That episode comes first, unless it
    had a later call. The others began at most a day before it, or later; without a task there are
    none.
    """
    task = func.coalesce(episodes.c.joined_task, episodes.c.task)
    asked = select(episodes.c.id, task.label("task")).where(episodes.c.key == key)
    own = (await connection.execute(asked)).one()
    query = (
        select(episodes.c.id)
        .where(
            episodes.c.id >= lowest_id_at(time_of(own.id) - COMPARED_WITHIN),
            task == own.task if own.task is not None else episodes.c.id == own.id,
            episodes.c.root.is_(None),
            episodes.c.deleted_at.is_(None),
            episodes.c.quarantined_reason.is_(None),
            episodes.c.last_call_at < quiet_since,
        )
        .order_by((episodes.c.id == own.id).desc(), episodes.c.id.desc())
        .limit(most)
    )
    return list((await connection.execute(query)).scalars())


async def store_judgement(connection: AsyncConnection, judgement: Judgement) -> None:
    """Store a judgement in place of the judge's earlier one, unless the episode was deleted."""
    # A deletion locks the episode's row before it looks for judgements (`store.deleting`).
    alive = select(episodes.c.id).where(
        episodes.c.id == judgement.episode_id, episodes.c.deleted_at.is_(None)
    )
    if await connection.scalar(alive.with_for_update(read=True)) is None:
        return
    values = {name: getattr(judgement, name) for name in judgement.__struct_fields__}
    await connection.execute(
        postgresql.insert(judgements)
        .values(values)
        .on_conflict_do_update(
            index_elements=["episode_id", "judge"], set_=values | {"at": func.now()}
        )
    )


async def forget_unscored_judgements(connection: AsyncConnection, judge: str, tenant: str) -> int:
    """Delete a judge's judgements without a score, so that the judge is asked again.

    Only judgements about the tenant's episodes are deleted. Return how many.
    """
    query = delete(judgements).where(
        judgements.c.judge == judge,
        judgements.c.outcome != "judged",
        judgements.c.episode_id.in_(select(episodes.c.id).where(is_of_tenant(tenant))),
    )
    return (await connection.execute(query)).rowcount


_LOCK_KEY = "hashtextextended(:name, 0)"


@asynccontextmanager
async def hold_judge(engine: AsyncEngine, judge: str) -> AsyncIterator[bool]:
    """Try once to lock a judge within the block; yield False if another process runs it.

    `judge` is the stored name (`store.tenants`): two tenants may have judges of one name.
    """
    lock_name = {"name": f"pawl judge {judge}"}
    async with engine.connect() as connection:
        query = text(f"SELECT pg_try_advisory_lock({_LOCK_KEY})")
        held = bool((await connection.execute(query, lock_name)).scalar_one())
        await connection.commit()
        try:
            yield held
        finally:
            # The lock belongs to the connection, which goes back to the pool: unlock it. A broken
            # connection has lost its lock already.
            if held and not connection.invalidated:
                with suppress(DBAPIError):
                    unlock = text(f"SELECT pg_advisory_unlock({_LOCK_KEY})")
                    await connection.execute(unlock, lock_name)


# Episodes for a person to score

# Why an episode is shown to a person.
ReviewReason = Literal["unscored", "disagreeing", "uncertain"]
# Prefix of the idempotency keys of scores that a person gave in the console.
REVIEW_KEY_PREFIX: Final = "review-"
# A metric, 0 to 1, that a judge may state beside its score. Below UNSURE_BELOW the judge is unsure.
CONFIDENCE_METRIC: Final = "confidence"
UNSURE_BELOW: Final = 0.5
# Two scores of an episode disagree if they differ by more than this share of the metric's range.
DISAGREEING_SHARE: Final = 0.25
# How many statements are read: the newest of all feedback.
MOST_STATEMENTS: Final = 20_000
# `source` is the judge, or the API key that a fact came with.
_STATEMENTS: Final = f"""
    SELECT f.episode_id, f.metric, f.value, COALESCE(f.call_id, f.episode_id) AS about, f.at,
        COALESCE(f.source, r.api_key, '') AS source
    FROM (SELECT * FROM feedback ORDER BY id DESC LIMIT {MOST_STATEMENTS}) f
    JOIN feedback_requests r ON r.id = f.request_id WHERE f.episode_id IS NOT NULL
"""
_NEEDS_REVIEW_IF: Final[Mapping[ReviewReason, str]] = {
    "unscored": "p.scored_at IS NULL AND p.call_scored_at IS NULL"
    " AND p.last_call_at < now() - make_interval(secs => :quiet_s)",
    "disagreeing": f"""p.episode_id IN (
        SELECT episode_id FROM (
            SELECT DISTINCT ON (about, metric, source) episode_id, about, metric, value
            FROM ({_STATEMENTS}) said
            ORDER BY about, metric, source, at DESC) own
        JOIN unnest(CAST(:metrics AS text[]), CAST(:apart AS double precision[]))
            AS scale (metric, apart) USING (metric)
        GROUP BY episode_id, about, metric HAVING max(value) - min(value) > min(apart))""",
    "uncertain": f"""(p.scored_at IS NULL AND EXISTS (
            SELECT FROM judgements j WHERE j.episode_id = p.episode_id
                AND (j.outcome = 'cannot_tell' OR j.outcome = 'failed' AND j.due_at IS NULL))
        OR p.episode_id IN (SELECT episode_id FROM ({_STATEMENTS}) said
            WHERE metric = '{CONFIDENCE_METRIC}' AND value < {UNSURE_BELOW}))""",
}
_QUEUE: Final = """
    SELECT p.episode_id, e.key, p.task, p.version, p.reward, p.last_call_at
    FROM episode_policies p JOIN episodes e ON e.id = p.episode_id
    WHERE p.policy = :policy AND p.claimed_by IS NULL AND p.claimable AND {reason}
        AND {of_tenant}
        AND (CAST(:until AS uuid) IS NULL OR p.episode_id <= :until)
        AND (CAST(:before AS uuid) IS NULL OR p.episode_id < :before)
        AND NOT EXISTS (SELECT FROM feedback f JOIN feedback_requests r ON r.id = f.request_id
            WHERE f.episode_id = p.episode_id AND starts_with(r.idempotency_key, :reviewed))
    ORDER BY p.episode_id DESC LIMIT :most
"""
# A metric without bounds has the `reward_range` of the policy's newest rule, or 0 to 1.
_SCALES: Final = text(
    f"""
    SELECT t.metric, t.place, t.texts,
        CASE WHEN abs(t.low) < {LARGEST} THEN t.low ELSE COALESCE(g.low, 0) END AS low,
        CASE WHEN abs(t.high) < {LARGEST} THEN t.high ELSE COALESCE(g.high, 1) END AS high
    FROM ({TERMS_OF_POLICY}) t LEFT JOIN (
        SELECT CAST(gate->'reward_range'->>0 AS double precision) AS low,
            CAST(gate->'reward_range'->>1 AS double precision) AS high
        FROM policies WHERE name = :policy AND gate->'reward_range' IS NOT NULL
        ORDER BY version DESC LIMIT 1) g ON true
    ORDER BY t.place
    """
)
_OWN_KEY: Final = text(
    "SELECT key FROM episodes WHERE id = :id AND root IS NULL AND deleted_at IS NULL"
)


class Scale(Record, frozen=True, kw_only=True):
    """The scale of a metric in a policy's reward: numbers from `low` to `high`, or `texts`.

    `texts` maps each allowed text to its value.
    """

    metric: str
    low: float
    high: float
    texts: Mapping[str, float]


async def scales_of(connection: AsyncConnection, policy: str) -> list[Scale]:
    """Return the scales of the metrics that a policy's reward adds up, in the recipe's order."""
    rows = await connection.execute(_SCALES, {"policy": policy})
    return [Scale(metric=row.metric, low=row.low, high=row.high, texts=row.texts) for row in rows]


async def review_queue(
    connection: AsyncConnection,
    policy: str,
    reason: ReviewReason,
    scales: Sequence[Scale],
    tenant: str,
    *,
    before: UUID | None = None,
    until: UUID | None = None,
    most: int,
) -> list[Row[Any]]:
    """Return a tenant's episodes that a person should score for a policy, the newest first.

    No update has claimed them, and no person has scored them in the console. At most `most` are
    returned, with ids below `before` and not above `until`. `scales` are those of `scales_of`. A
    row has `episode_id`, `key` and `task` as stored, `version`, `reward` and `last_call_at`.
    """
    values = {
        "policy": policy,
        "quiet_s": QUIET_PERIOD.total_seconds(),
        "metrics": [scale.metric for scale in scales],
        "apart": [DISAGREEING_SHARE * (scale.high - scale.low) for scale in scales],
        "reviewed": scoped(tenant, REVIEW_KEY_PREFIX),
        "tenant": tenant,
        "before": before,
        "until": until,
        "most": most,
    }
    query = text(_QUEUE.format(reason=_NEEDS_REVIEW_IF[reason], of_tenant=IS_OF_TENANT))
    return list(await connection.execute(query, values))


async def key_to_review(connection: AsyncConnection, episode_id: UUID, tenant: str) -> str | None:
    """Return an episode's key as the client gave it, or None if the tenant has no such episode."""
    key = await connection.scalar(_OWN_KEY, {"id": episode_id})
    return bare(key) if key is not None and tenant_of(key) == tenant else None
