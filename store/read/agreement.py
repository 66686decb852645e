"""Measure how far a judge's statements agree with facts about the same episodes.

A judge's agreement is the share of pairs of unequal facts that the judge's scores put in the same
order; a pair with equal scores counts half. It is the concordance index (Harrell et al., JAMA
1982); for rewards of 0 and 1, the area under the ROC curve. It is 0.5 for a judge that answers at
random, or always the same, and does not depend on the judge's scale. Its standard error is that of
a ratio of U-statistics (Hoeffding, Ann. Math. Statist. 1948).

A judge's trust is 2 · agreement − 1, or 0 if the agreement less its standard error is below
`LEAST_AGREEMENT`. A judge whose agreement was never measured is trusted fully.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import groupby
from math import fsum, sqrt
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import OWN_EPISODE, TARGET_KINDS, Record
from store.values.rewards import TERMS_OF_POLICY

LEAST_AGREEMENT: Final = 0.6
# With fewer facts a judge is not measured.
FEWEST_COMPARED: Final = 20
# Number of newest statements that are read of each judge and kind of target, each with the newest
# fact about the same target.
MOST_STATEMENTS: Final = 1000
_PAIRS: Final = text(
    f"""
    WITH RECURSIVE judges AS (
        (SELECT source FROM feedback WHERE source IS NOT NULL ORDER BY source LIMIT 1)
        UNION ALL SELECT (
            SELECT source FROM feedback WHERE source > judges.source ORDER BY source LIMIT 1)
        FROM judges WHERE source IS NOT NULL),
    said AS (
        SELECT f.id, f.source, f.metric, f.value, f.episode_id,
            CASE WHEN e.method <> '{OWN_EPISODE}' THEN f.call_id END AS call_id
        FROM judges CROSS JOIN unnest(CAST(:kinds AS text[])) AS kinds (kind)
            CROSS JOIN LATERAL (
                SELECT * FROM feedback own WHERE own.source = judges.source
                    AND own.target_kind = kinds.kind ORDER BY id DESC LIMIT {MOST_STATEMENTS}) f
            JOIN episodes e ON e.id = f.episode_id
        WHERE f.value IS NOT NULL AND f.metric IN (SELECT metric FROM ({TERMS_OF_POLICY}) terms)
            AND EXISTS (SELECT FROM episode_policies p
                WHERE p.policy = :policy AND p.episode_id = COALESCE(e.root, e.id)))
    SELECT DISTINCT ON (s.source, s.episode_id, s.call_id, s.metric)
        s.source, s.metric, s.value AS opinion, fact.value AS fact
    FROM said s LEFT JOIN LATERAL (
        SELECT f.value FROM feedback f
        WHERE f.episode_id = s.episode_id AND f.metric = s.metric AND f.source IS NULL
            AND (s.call_id IS NULL OR f.call_id = s.call_id)
            AND (s.call_id IS NOT NULL OR f.call_id IS NULL OR EXISTS (
                SELECT FROM episodes e WHERE e.id = f.episode_id AND e.method = '{OWN_EPISODE}'))
        ORDER BY f.at DESC, f.value IS NULL DESC, f.value LIMIT 1) fact ON true
    ORDER BY s.source, s.episode_id, s.call_id, s.metric, s.id DESC
    """
)
# Each claim for training stores the trust of all judges; updates that expire episodes or import a
# version store none. The limit bounds the search if there never was a judge.
_LAST_TRUST: Final = text(
    """
    SELECT trust FROM (
        SELECT trust, claimed_at FROM updates WHERE policy = :policy
        ORDER BY claimed_at DESC LIMIT 200) newest
    WHERE trust IS NOT NULL ORDER BY claimed_at DESC LIMIT 1
    """
)


class Agreement(Record, frozen=True, kw_only=True):
    """How far a judge agrees with facts.

    `statements` were read, and `compared` of them have a fact about the same target. The agreement
    `share` (0 to 1) and its standard `error` are None if fewer than `FEWEST_COMPARED` were
    compared, or all facts are equal.
    """

    source: str
    statements: int
    compared: int
    share: float | None = None
    error: float | None = None

    @property
    def trust(self) -> float:
        """Return the weight of the judge's statements, 0 to 1."""
        if self.share is None or self.error is None:
            return 1.0
        return 2 * self.share - 1 if self.share - self.error >= LEAST_AGREEMENT else 0.0


async def agreement_by_judge(connection: AsyncConnection, policy: str) -> list[Agreement]:
    """Return the agreement of each judge of a policy's newest rewards, sorted by judge."""
    values = {"policy": policy, "kinds": list(TARGET_KINDS)}
    rows = (await connection.execute(_PAIRS, values)).all()
    by_judge = []
    for source in sorted({row.source for row in rows}):
        own = [row for row in rows if row.source == source]
        pairs = [(row.metric, row.opinion, row.fact) for row in own if row.fact is not None]
        share, error = agreement(pairs) if len(pairs) >= FEWEST_COMPARED else (None, None)
        by_judge.append(
            Agreement(
                source=source, statements=len(own), compared=len(pairs), share=share, error=error
            )
        )
    return by_judge


async def trust_in_judges(connection: AsyncConnection, policy: str) -> dict[str, float]:
    """Return the trust in each of a policy's judges: the weight of its statements, 0 to 1.

    A judge that cannot be measured any more keeps the trust of the last update.
    """
    before: dict[str, float] = await connection.scalar(_LAST_TRUST, {"policy": policy}) or {}
    measured = await agreement_by_judge(connection, policy)
    return before | {
        one.source: one.trust if one.share is not None else before.get(one.source, 1.0)
        for one in measured
    }


def agreement(
    compared: Sequence[tuple[str, float, float]],
) -> tuple[float, float] | tuple[None, None]:
    """Return the agreement of opinions with facts, and its standard error (pure).

    An item of `compared` is (metric, opinion, fact). Only facts of the same metric form pairs. Both
    results are None if no two facts of a metric differ.
    """
    # For each item: its pairs in the same order, and all its pairs of unequal facts.
    concordant, comparable = [0.0] * len(compared), [0] * len(compared)
    for sign in (1, -1):
        # Opinions about lower facts, in order; then, with all signs changed, about higher ones.
        below: dict[str, list[float]] = {}
        order = sorted(range(len(compared)), key=lambda place: sign * compared[place][2])
        for _, equal in groupby(order, key=lambda place: compared[place][2]):
            places = list(equal)
            for place in places:
                metric, opinion, _ = compared[place]
                lower = below.get(metric, [])
                first, last = (side(lower, sign * opinion) for side in (bisect_left, bisect_right))
                concordant[place] += (first + last) / 2
                comparable[place] += len(lower)
            for place in places:
                metric, opinion, _ = compared[place]
                insort(below.setdefault(metric, []), sign * opinion)
    total = sum(comparable)
    if not total:
        return None, None
    share = fsum(concordant) / total
    squares = [(a - share * b) ** 2 for a, b in zip(concordant, comparable, strict=True)]
    return share, 2 * sqrt(fsum(squares)) / total
