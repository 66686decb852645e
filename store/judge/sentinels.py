"""Keep a judge's sentinels: episodes that it scores again and again, apart from all rewards.

A judge's name is as it is kept (`store.tenants`). What a sentinel was scored goes with it, and a
sentinel with its episode, when that is deleted or outdated.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import msgspec
from sqlalchemy import Select, Text, and_, cast, delete, func, or_, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.judge.judgements import hold_episodes
from store.read.episodes import matching
from store.records import REWARD, Record
from store.schema.recorded import episodes
from store.schema.sentinels import sentinel_rounds, sentinel_scores, sentinels
from store.schema.stated import feedback, judgements
from store.tenants import bare, tenant_of

# `changed`: the judge was not asked, as it would be shown something else than at first.
SentinelOutcome = Literal["scored", "cannot_tell", "failed", "changed"]


class Sentinel(Record, frozen=True, kw_only=True):
    """Name an episode that a judge scores again, and the metric whose value is its score.

    `digest` is that of the line that the judge is shown.
    """

    episode_id: UUID
    digest: UUID
    metric: str = REWARD


class Rescored(Record, frozen=True, kw_only=True):
    """State what came of asking the judge about a sentinel; `score` is there if it was scored."""

    outcome: SentinelOutcome
    score: float | None = None
    reason: str | None = None


class SentinelLine(Record, frozen=True, kw_only=True):
    """Describe a sentinel: its reference, and what the judge said last.

    `reference` is the mean of the scores that newer ones are compared with, as far as `drawn` of
    `draws` are there. `outcome`, `score` and `at` are of the last round that it was in.
    """

    tenant: str
    judge: str
    episode: str
    metric: str
    draws: int
    drawn: int
    reference: float | None
    outcome: SentinelOutcome | None
    score: float | None
    reason: str | None
    at: datetime | None


async def sample(
    connection: AsyncConnection,
    judge: str,
    number: int,
    *,
    seed: int = 0,
    metric: str = REWARD,
    policy: str | None = None,
) -> list[UUID]:
    """Return at most `number` episodes that the judge scored, evenly over the range of scores.

    The range of what was stated of `metric` is cut into `number` bands of equal width, and
    episodes are taken from all bands in turn; `seed` decides which come first within a band.
    `policy` selects episodes with calls of it. Those that are sentinels already are left out.
    """
    taken = select(sentinels.c.episode_id).where(sentinels.c.judge == judge)
    there = matching(policy=policy, tenant=tenant_of(judge)).where(
        episodes.c.quarantined_reason.is_(None), episodes.c.id.not_in(taken)
    )
    asked = and_(
        judgements.c.episode_id == feedback.c.episode_id,
        judgements.c.judge == bare(judge),
        judgements.c.outcome == "judged",
    )
    scored = (
        select(feedback.c.episode_id.label("id"), func.max(feedback.c.value).label("score"))
        .join(judgements, asked)
        .where(
            feedback.c.metric == metric,
            feedback.c.value.is_not(None),
            feedback.c.episode_id.in_(there.order_by(None)),
        )
        .group_by(feedback.c.episode_id)
        .cte("scored")
    )
    # Halves, as the difference of two numbers may be more than a number can be.
    half, low = scored.c.score / 2, func.min(scored.c.score / 2).over()
    width = func.nullif(func.max(scored.c.score / 2).over() - low, 0)
    band = func.least(func.floor((half - low) / width * number), number - 1)
    # Where all scores are equal there is one band: of nulls, `least` takes no notice.
    banded = select(scored.c.id, band.label("band")).subquery()
    by_chance = func.hashtextextended(cast(banded.c.id, Text), seed)
    turn = func.row_number().over(partition_by=banded.c.band, order_by=[by_chance, banded.c.id])
    chosen = select(banded.c.id).order_by(turn, banded.c.band).limit(number)
    return list((await connection.execute(chosen)).scalars())


async def add_sentinels(
    connection: AsyncConnection, judge: str, added: Sequence[Sentinel], draws: int
) -> int:
    """Add sentinels from the judge's next round on; return how many were none before.

    The first `draws` scores of each are its reference. Episodes that are deleted meanwhile are left
    out. All episodes are locked until the transaction ends: add not too many at once.
    """
    there = await hold_episodes(connection, [one.episode_id for one in added])
    same = {"judge": judge, "draws": draws, "since_round": _next_round(judge)}
    values = [msgspec.structs.asdict(one) | same for one in added if one.episode_id in there]
    if not values:
        return 0
    made = postgresql.insert(sentinels).values(values).on_conflict_do_nothing()
    return (await connection.execute(made)).rowcount


def _next_round(judge: str) -> Any:
    last = select(func.coalesce(func.max(sentinel_rounds.c.round), 0)).where(
        sentinel_rounds.c.judge == judge
    )
    return last.scalar_subquery() + 1


async def remove_sentinels(
    connection: AsyncConnection, judge: str, ids: Sequence[UUID] | None = None
) -> int:
    """Remove a judge's sentinels, or those of `ids`, with their scores; return how many."""
    query = delete(sentinels).where(sentinels.c.judge == judge)
    if ids is not None:
        query = query.where(sentinels.c.episode_id.in_(ids))
    return (await connection.execute(query)).rowcount


async def sentinels_of(connection: AsyncConnection, judge: str) -> list[Sentinel]:
    """Return a judge's sentinels."""
    columns = [sentinels.c.episode_id, sentinels.c.digest, sentinels.c.metric]
    query = select(*columns).where(sentinels.c.judge == judge).order_by(sentinels.c.episode_id)
    return [_sentinel(row) for row in await connection.execute(query)]


async def renew(connection: AsyncConnection, judge: str, shown: Sequence[Sentinel]) -> int:
    """Take new references from the judge's next round on; return of how many sentinels.

    What was scored before is no longer compared with, and deleted when a round ends. `shown` are
    sentinels as they would be shown now.
    """
    renewed = 0
    for one in shown:
        query = update(sentinels).where(
            sentinels.c.judge == judge, sentinels.c.episode_id == one.episode_id
        )
        values = {"since_round": _next_round(judge), "digest": one.digest}
        renewed += (await connection.execute(query.values(values))).rowcount
    return renewed


async def waiting(
    connection: AsyncConnection, judge: str, number: int, most: int | None
) -> list[Sentinel]:
    """Return at most `most` of the sentinels that are not scored yet in a round; None: all.

    Their order is chosen by chance: one that is refused each time is not always the first.
    """
    query = _with_outcome(judge, number).where(sentinel_scores.c.outcome.is_(None))
    rows = await connection.execute(query.order_by(func.random()).limit(most))
    return [_sentinel(row) for row in rows]


async def another(
    connection: AsyncConnection, judge: str, number: int, besides: UUID
) -> Sentinel | None:
    """Return another sentinel of a round: one that was scored, else one that waits, if any does."""
    outcome = sentinel_scores.c.outcome
    query = (
        _with_outcome(judge, number)
        .where(sentinels.c.episode_id != besides, or_(outcome.is_(None), outcome == "scored"))
        .order_by(outcome.is_(None), func.random())
        .limit(1)
    )
    row = (await connection.execute(query)).first()
    return None if row is None else _sentinel(row)


def _with_outcome(judge: str, number: int) -> Select[Any]:
    """Return the sentinels of a round, with their scores as far as they have any."""
    of_round = and_(
        sentinel_scores.c.judge == sentinels.c.judge,
        sentinel_scores.c.episode_id == sentinels.c.episode_id,
        sentinel_scores.c.round == number,
    )
    return (
        select(sentinels.c.episode_id, sentinels.c.digest, sentinels.c.metric)
        .outerjoin(sentinel_scores, of_round)
        .where(sentinels.c.judge == judge, sentinels.c.since_round <= number)
    )


def _sentinel(row: Any) -> Sentinel:
    return Sentinel(episode_id=row.episode_id, digest=row.digest, metric=row.metric)


async def note_score(
    connection: AsyncConnection, judge: str, number: int, episode_id: UUID, rescored: Rescored
) -> None:
    """Store what came of a sentinel in a round, once; nothing if it is a sentinel no more."""
    there = select(sentinels.c.episode_id).where(
        sentinels.c.judge == judge, sentinels.c.episode_id == episode_id
    )
    # Locked, so that it is not removed before this is committed.
    if await connection.scalar(there.with_for_update(read=True, key_share=True)) is None:
        return
    values = msgspec.structs.asdict(rescored)
    await connection.execute(
        postgresql.insert(sentinel_scores)
        .values(judge=judge, episode_id=episode_id, round=number, **values)
        .on_conflict_do_nothing()
    )


_LINES: Final = text(
    """
    SELECT s.judge, e.key, s.metric, s.draws, r.drawn, r.reference,
        l.outcome, l.score, l.reason, l.at
    FROM sentinels s JOIN episodes e ON e.id = s.episode_id
    CROSS JOIN LATERAL (
        SELECT count(*) AS drawn, avg(score) AS reference FROM (
            SELECT score FROM sentinel_scores c
            WHERE (c.judge, c.episode_id) = (s.judge, s.episode_id)
                AND c.round >= s.since_round AND c.outcome = 'scored'
            ORDER BY c.round LIMIT s.draws) drawn) r
    LEFT JOIN LATERAL (
        SELECT outcome, score, reason, at FROM sentinel_scores c
        WHERE (c.judge, c.episode_id) = (s.judge, s.episode_id)
        ORDER BY c.round DESC LIMIT 1) l ON true
    WHERE CAST(:judge AS text) IS NULL OR s.judge = :judge
    ORDER BY s.judge, r.reference, s.episode_id
    """
)


async def list_sentinels(connection: AsyncConnection, judge: str | None) -> list[SentinelLine]:
    """Return the sentinels of a judge, or of all judges, those of the lowest references first."""
    lines: list[SentinelLine] = []
    for row in await connection.execute(_LINES, {"judge": judge}):
        fields: dict[str, Any] = {
            name: getattr(row, name, None) for name in SentinelLine.__struct_fields__
        }
        fields |= {"tenant": tenant_of(row.judge), "judge": bare(row.judge)}
        lines.append(SentinelLine(**fields | {"episode": bare(row.key)}))
    return lines
