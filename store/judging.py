"""Find the episodes that wait for a judge, and record what came of those it was asked about.

A judge's scores are stored as feedback. This table only records that the judge was asked, so that
neither a restart nor an answer without a score makes Pawl ask about an episode forever. An episode
that could not be judged waits again once it has a later call.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Literal
from uuid import UUID

from sqlalchemy import and_, case, delete, func, or_, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.read.episodes import is_of, matching
from store.records import Record
from store.schema.tables import episode_policies, episodes, judgements

Outcome = Literal["judged", "cannot_tell", "failed"]


class Awaiting(Record, frozen=True, kw_only=True):
    """Describe an episode that waits for a judge, and how often the judge failed on it so far."""

    episode_id: UUID
    failures: int


class Judgement(Record, frozen=True, kw_only=True):
    """Name the result of asking a judge about an episode.

    `due_at` is the time at which a failed judgement is tried again; None: never.
    """

    episode_id: UUID
    judge: str
    outcome: Outcome
    attempts: int
    # The time of the last call that the judge was shown.
    last_call_at: datetime
    reason: str | None = None
    due_at: datetime | None = None


async def awaiting(
    connection: AsyncConnection,
    judge: str,
    *,
    now: datetime,
    quiet_since: datetime,
    limit: int,
    since: datetime | None = None,
    agent: str | None = None,
    policy: str | None = None,
    tenant: str | None = None,
) -> list[Awaiting]:
    """Return at most `limit` episodes that wait for `judge`, oldest first.

    A policy that may still claim them has no score of them, and their last call was before
    `quiet_since`. Quarantined ones are left out. `since`, `agent`, `policy` and `tenant` filter as
    in `store.read.episodes.matching`; `now` is compared with the time of the next attempt.
    """
    part = episodes.alias("part")
    of_parts = select(func.max(part.c.last_call_at)).where(part.c.root == episodes.c.id)
    last_call = func.greatest(episodes.c.last_call_at, of_parts.scalar_subquery())
    claims = select(episode_policies).where(episode_policies.c.episode_id == episodes.c.id)
    waits = claims.where(
        episode_policies.c.claimed_by.is_(None), episode_policies.c.scored_at.is_(None)
    )
    earlier = judgements.alias("asked")
    news = earlier.c.last_call_at < last_call
    query = (
        matching(since=since, agent=agent, policy=policy, tenant=tenant)
        .outerjoin(earlier, and_(earlier.c.episode_id == episodes.c.id, earlier.c.judge == judge))
        .add_columns(earlier.c.attempts, news.label("news"))
        .where(
            or_(and_(~claims.exists(), episodes.c.scored_at.is_(None)), waits.exists()),
            episodes.c.quarantined_reason.is_(None),
            last_call < quiet_since,
            or_(
                earlier.c.episode_id.is_(None),
                and_(earlier.c.outcome == "failed", earlier.c.due_at <= now),
                and_(earlier.c.outcome != "judged", news),
            ),
        )
        .limit(limit)
    )
    rows = await connection.execute(query)
    return [
        Awaiting(episode_id=row.id, failures=0 if row.news else row.attempts or 0) for row in rows
    ]


async def is_scored(connection: AsyncConnection, episode_id: UUID) -> bool:
    """Return whether the episode has a score by now, from anybody, for all of its policies."""
    own = select(episode_policies).where(episode_policies.c.episode_id == episode_id)
    lacking = own.where(episode_policies.c.scored_at.is_(None)).exists()
    alone = select(episodes.c.scored_at).where(episodes.c.id == episode_id)
    query = select(case((own.exists(), ~lacking), else_=alone.scalar_subquery().is_not(None)))
    return bool(await connection.scalar(query))


async def note(connection: AsyncConnection, judgement: Judgement) -> None:
    """Store a judgement, in place of the judge's earlier one; nothing of a deleted episode."""
    # Whoever deletes an episode locks its row before looking for what is about it
    # (`store.deleting`).
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


async def forget_unjudged(connection: AsyncConnection, judge: str, tenant: str) -> int:
    """Delete judgements without a score of a tenant's episodes; return how many.

    The judge is then asked about them again.
    """
    query = delete(judgements).where(
        judgements.c.judge == judge,
        judgements.c.outcome != "judged",
        judgements.c.episode_id.in_(select(episodes.c.id).where(is_of(tenant))),
    )
    return (await connection.execute(query)).rowcount


_LOCK = "hashtextextended(:what, 0)"


@asynccontextmanager
async def holding(engine: AsyncEngine, judge: str) -> AsyncIterator[bool]:
    """Hold the lock of a judge, so that one process runs it; yield False if another has.

    The judge's name is as it is kept (`store.tenants`): two tenants may have judges of one name.
    """
    what = {"what": f"pawl judge {judge}"}
    async with engine.connect() as connection:
        query = text(f"SELECT pg_try_advisory_lock({_LOCK})")
        held = bool((await connection.execute(query, what)).scalar_one())
        await connection.commit()
        try:
            yield held
        finally:
            # The lock belongs to the connection, which goes back to the pool: unlock it. A broken
            # connection has lost its lock already.
            if held and not connection.invalidated:
                with suppress(DBAPIError):
                    await connection.execute(text(f"SELECT pg_advisory_unlock({_LOCK})"), what)
