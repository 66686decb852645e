"""Which episodes wait for a judge, and what it made of those it was asked about.

What a judge says is feedback; here is only kept that it was asked, so that neither a restart nor
an answer that says nothing makes it be asked for ever. An episode that went on after it could
not be judged is news again.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Literal
from uuid import UUID

from sqlalchemy import and_, delete, func, or_, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.reading import matching
from store.records import Record
from store.tables import episodes, judgements

Outcome = Literal["judged", "cannot_tell", "failed"]


class Awaiting(Record, frozen=True, kw_only=True):
    """An episode that a judge is to be asked about, and how often it failed on it."""

    episode_id: UUID
    failures: int


class Judgement(Record, frozen=True, kw_only=True):
    """What came of asking: `due_at` says when a failed one is tried again, if it is."""

    episode_id: UUID
    judge: str
    outcome: Outcome
    attempts: int
    # Of the episode, as the judge was shown it.
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
) -> list[Awaiting]:
    """Episodes without a score whose last call was before `quiet_since`, oldest first.

    None that an update holds or held, nor one that is kept from training by a doubt.
    `since`, `agent` and `policy` choose as in `store.reading`.
    """
    part = episodes.alias("part")
    of_parts = select(func.max(part.c.last_call_at)).where(part.c.root == episodes.c.id)
    last_call = func.greatest(episodes.c.last_call_at, of_parts.scalar_subquery())
    asked = judgements.alias("asked")
    news = asked.c.last_call_at < last_call
    query = (
        matching(since=since, agent=agent, policy=policy)
        .outerjoin(asked, and_(asked.c.episode_id == episodes.c.id, asked.c.judge == judge))
        .add_columns(asked.c.attempts, news.label("news"))
        .where(
            episodes.c.scored_at.is_(None),
            episodes.c.claimed_by.is_(None),
            episodes.c.quarantined_reason.is_(None),
            last_call < quiet_since,
            or_(
                asked.c.episode_id.is_(None),
                and_(asked.c.outcome == "failed", asked.c.due_at <= now),
                and_(asked.c.outcome != "judged", news),
            ),
        )
        .limit(limit)
    )
    rows = await connection.execute(query)
    return [
        Awaiting(episode_id=row.id, failures=0 if row.news else row.attempts or 0) for row in rows
    ]


async def is_scored(connection: AsyncConnection, episode_id: UUID) -> bool:
    """Whether somebody has scored it by now."""
    query = select(episodes.c.scored_at).where(episodes.c.id == episode_id)
    return (await connection.execute(query)).scalar() is not None


async def note(connection: AsyncConnection, judgement: Judgement) -> None:
    """Keep what came of asking, in place of what came of it before."""
    values = {name: getattr(judgement, name) for name in judgement.__struct_fields__}
    await connection.execute(
        postgresql.insert(judgements)
        .values(values)
        .on_conflict_do_update(
            index_elements=["episode_id", "judge"], set_=values | {"at": func.now()}
        )
    )


async def forget_unjudged(connection: AsyncConnection, judge: str) -> int:
    """Let the judge be asked again about what it could not judge; returns how many."""
    query = delete(judgements).where(judgements.c.judge == judge, judgements.c.outcome != "judged")
    return (await connection.execute(query)).rowcount


_LOCK = "hashtextextended('pawl judge ' || :judge, 0)"


@asynccontextmanager
async def holding(engine: AsyncEngine, judge: str) -> AsyncIterator[bool]:
    """Be the only one that runs this judge until this is left; False: another process is."""
    async with engine.connect() as connection:
        query = text(f"SELECT pg_try_advisory_lock({_LOCK})")
        held = bool((await connection.execute(query, {"judge": judge})).scalar_one())
        await connection.commit()
        try:
            yield held
        finally:
            # The lock is the connection's, which goes back to its pool; one that broke has none.
            if held and not connection.invalidated:
                with suppress(DBAPIError):
                    await connection.execute(
                        text(f"SELECT pg_advisory_unlock({_LOCK})"), {"judge": judge}
                    )
