"""Keep the rounds in which a judge's sentinels are scored, and the figures that each came to.

Whoever holds the judge's lock (`store.judge.judgements.holding`, work `sentinels`) begins a round,
or goes on with one that was left unfinished. Times are the database's.
"""

from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import Record
from store.tenants import bare, tenant_of


class RoundFigures(Record, frozen=True, kw_only=True):
    """Hold what a round came to; the last four are null where nothing was compared.

    `drifted` is null as well where too little was compared for any drift to be shown.
    """

    compared: int
    mean: float | None = None
    mean_absolute: float | None = None
    evidence: float | None = None
    drifted: bool | None = None


class Round(RoundFigures, frozen=True, kw_only=True):
    """Describe a round that ended.

    Attributes:
        tenant: whose judge it is.
        judge: the judge's name.
        round: its number, from 1.
        at: when it began.
        scored: sentinels that the judge scored.
        unscored: those about which it could not tell, or failed.
        changed: those that it was not asked about, as it would have been shown something else.
        gone: how many fewer sentinels there were than in the round before.
        compared: sentinels with a reference.
    """

    tenant: str
    judge: str
    round: int
    at: datetime
    scored: int
    unscored: int
    changed: int
    gone: int


class Watched(Record, frozen=True, kw_only=True):
    """Name a judge that has sentinels, and what is known of it by them.

    Attributes:
        tenant: whose judge it is.
        judge: the judge's name.
        sentinels: how many it has.
        last: the last round that ended, unless all sentinels have newer references.
        drifted: what the last of these rounds says that could show a drift; null: none could.
        unfinished_since: when the round was begun that has not ended.
    """

    tenant: str
    judge: str
    sentinels: int
    last: Round | None
    drifted: bool | None
    unfinished_since: datetime | None


class Compared(Record, frozen=True, kw_only=True):
    """Hold the scores of a sentinel: its references, and the newest, oldest first."""

    episode_id: UUID
    references: tuple[float, ...]
    newest: tuple[float, ...]


# It is due at once if no sentinel was in the last round: all have new references to come.
_DUE_IN: Final = text(
    """
    SELECT CASE WHEN r.round IS NULL OR r.ended_at IS NULL OR r.round < s.since THEN 0
        ELSE GREATEST(0, CAST(:every AS double precision)
            - CAST(extract(epoch FROM now() - r.ended_at) AS double precision)) END
    FROM (
        SELECT min(since_round) AS since FROM sentinels WHERE judge = :judge HAVING count(*) > 0) s
    LEFT JOIN LATERAL (
        SELECT * FROM sentinel_rounds WHERE judge = :judge ORDER BY round DESC LIMIT 1) r ON true
    """
)
_UNFINISHED: Final = text(
    """
    SELECT round, EXISTS (
        SELECT FROM sentinels s WHERE s.judge = r.judge AND s.since_round <= r.round) AS has_any
    FROM sentinel_rounds r WHERE judge = :judge AND ended_at IS NULL
    """
)
# Who lost the lock with its connection may have begun the round: this goes on with it.
_BEGIN: Final = text(
    """
    INSERT INTO sentinel_rounds (judge, round)
    SELECT :judge, COALESCE(max(round), 0) + 1 FROM sentinel_rounds WHERE judge = :judge
    ON CONFLICT (judge, round) DO UPDATE SET judge = excluded.judge RETURNING round
    """
)
_COMPARED: Final = text(
    """
    SELECT s.episode_id, r.scores AS references, n.scores AS newest
    FROM sentinels s
    JOIN sentinel_scores c ON (c.judge, c.episode_id, c.round, c.outcome)
        = (s.judge, s.episode_id, :round, 'scored')
    CROSS JOIN LATERAL (
        SELECT array_agg(f.score ORDER BY f.round) AS scores, max(f.round) AS last FROM (
            SELECT round, score FROM sentinel_scores o
            WHERE (o.judge, o.episode_id) = (s.judge, s.episode_id)
                AND o.round >= s.since_round AND o.outcome = 'scored'
            ORDER BY o.round LIMIT s.draws) f) r
    CROSS JOIN LATERAL (
        SELECT array_agg(l.score ORDER BY l.round) AS scores FROM (
            SELECT round, score FROM sentinel_scores o
            WHERE (o.judge, o.episode_id) = (s.judge, s.episode_id)
                AND o.round > r.last AND o.round <= :round AND o.outcome = 'scored'
            ORDER BY o.round DESC LIMIT s.draws) l) n
    WHERE s.judge = :judge AND n.scores IS NOT NULL
    ORDER BY s.episode_id
    """
)
# The numbers are those of the sentinels that are still there.
_END: Final = text(
    """
    UPDATE sentinel_rounds r SET ended_at = now(), scored = c.scored, unscored = c.unscored,
        changed = c.changed, compared = :compared, mean = :mean, mean_absolute = :mean_absolute,
        evidence = :evidence, drifted = :drifted
    FROM (
        SELECT count(*) FILTER (WHERE outcome = 'scored') AS scored,
            count(*) FILTER (WHERE outcome IN ('cannot_tell', 'failed')) AS unscored,
            count(*) FILTER (WHERE outcome = 'changed') AS changed
        FROM sentinel_scores s JOIN sentinels USING (judge, episode_id)
        WHERE s.judge = :judge AND s.round = :round) c
    WHERE r.judge = :judge AND r.round = :round AND r.ended_at IS NULL
    """
)
_NUMBER: Final = "scored + unscored + changed"
_ROUNDS: Final = text(
    f"""
    SELECT *, begun_at AS at,
        GREATEST(0, lag({_NUMBER}) OVER (PARTITION BY judge ORDER BY round) - ({_NUMBER})) AS gone
    FROM (
        SELECT * FROM sentinel_rounds WHERE judge = :judge AND ended_at IS NOT NULL
        ORDER BY round DESC LIMIT :most + 1) newest
    ORDER BY round DESC LIMIT :most
    """
)
# What is neither a reference nor among the newest is compared with nothing any more. It waits for
# nobody who deletes sentinels, as it has no order of locks in common with them.
_FORGET: Final = text(
    """
    DELETE FROM sentinel_scores WHERE (judge, episode_id, round) IN (
        SELECT c.judge, c.episode_id, c.round
        FROM sentinel_scores c JOIN sentinels s USING (judge, episode_id)
        WHERE c.judge = :judge AND c.round < :round
            AND (c.outcome <> 'scored' OR c.round < s.since_round OR s.draws <= LEAST(
                (SELECT count(*) FROM sentinel_scores o
                    WHERE (o.judge, o.episode_id, o.outcome) = (c.judge, c.episode_id, 'scored')
                        AND o.round >= s.since_round AND o.round < c.round),
                (SELECT count(*) FROM sentinel_scores o
                    WHERE (o.judge, o.episode_id, o.outcome) = (c.judge, c.episode_id, 'scored')
                        AND o.round > c.round)))
        FOR UPDATE OF c SKIP LOCKED)
    """
)
# A round before all of the sentinels' references says nothing about them.
_WATCHED: Final = text(
    """
    SELECT s.*, v.drifted, u.begun_at AS unfinished_since
    FROM (
        SELECT judge, count(*) AS number, min(since_round) AS since FROM sentinels
        WHERE CAST(:judge AS text) IS NULL OR judge = :judge GROUP BY judge) s
    LEFT JOIN LATERAL (
        SELECT drifted FROM sentinel_rounds r
        WHERE r.judge = s.judge AND r.round >= s.since AND r.drifted IS NOT NULL
        ORDER BY round DESC LIMIT 1) v ON true
    LEFT JOIN LATERAL (
        SELECT begun_at FROM sentinel_rounds r
        WHERE r.judge = s.judge AND r.ended_at IS NULL ORDER BY round DESC LIMIT 1) u ON true
    ORDER BY s.judge
    """
)


async def due_in(connection: AsyncConnection, judge: str, every_s: float) -> float | None:
    """Return in how many seconds a round is due, 0 if it is now; None without sentinels."""
    due = await connection.scalar(_DUE_IN, {"judge": judge, "every": every_s})
    return None if due is None else float(due)


async def begin_round(connection: AsyncConnection, judge: str) -> int:
    """Return the number of the unfinished round, or of a new one; the judge's lock is held.

    An unfinished one that no sentinel is in any more, as all have new references to come, is ended.
    """
    unfinished = (await connection.execute(_UNFINISHED, {"judge": judge})).first()
    if unfinished is not None and unfinished.has_any:
        return int(unfinished.round)
    if unfinished is not None:
        await end_round(connection, judge, unfinished.round, RoundFigures(compared=0))
    return int(await connection.scalar(_BEGIN, {"judge": judge}) or 0)


async def compared_in(connection: AsyncConnection, judge: str, number: int) -> list[Compared]:
    """Return the scores of the sentinels that were scored in a round and have all references.

    A sentinel's first scores are its references, as many as it was to have; of those since then
    the newest are returned, at most as many.
    """
    rows = await connection.execute(_COMPARED, {"judge": judge, "round": number})
    return [
        Compared(
            episode_id=row.episode_id, references=tuple(row.references), newest=tuple(row.newest)
        )
        for row in rows
    ]


async def end_round(
    connection: AsyncConnection, judge: str, number: int, figures: RoundFigures
) -> None:
    """Write what a round came to, if it has not ended; delete scores that no later one needs."""
    values = msgspec.structs.asdict(figures) | {"judge": judge, "round": number}
    await connection.execute(_END, values)
    await connection.execute(_FORGET, {"judge": judge, "round": number})


async def rounds(connection: AsyncConnection, judge: str, most: int) -> list[Round]:
    """Return the newest rounds of a judge that ended, the newest first."""
    rows = await connection.execute(_ROUNDS, {"judge": judge, "most": most})
    return [_round(row) for row in rows]


async def watched(connection: AsyncConnection, judge: str | None = None) -> list[Watched]:
    """Return every judge that has sentinels, or the one that is named if it has any."""
    judges: list[Watched] = []
    for row in (await connection.execute(_WATCHED, {"judge": judge})).all():
        ended = [one for one in await rounds(connection, row.judge, 1) if one.round >= row.since]
        one = Watched(
            tenant=tenant_of(row.judge),
            judge=bare(row.judge),
            sentinels=row.number,
            last=ended[0] if ended else None,
            drifted=row.drifted,
            unfinished_since=row.unfinished_since,
        )
        judges.append(one)
    return judges


def _round(row: Any) -> Round:
    stored = {name: getattr(row, name, None) for name in Round.__struct_fields__}
    named = {"tenant": tenant_of(row.judge), "judge": bare(row.judge), "gone": row.gone or 0}
    return Round(**stored | named)
