"""Read the rewards of evaluation: a curve over a policy's versions, with confidence intervals.

An episode of the `eval` split counts for each policy that has calls in it, at the version of that
policy's first call. Left out are episodes that are quarantined, and those that an update of the
policy had claimed before a call said that they are evaluation: what was trained on evaluates
nothing. The rewards of work, which is trained on, can be read in the same way. What a policy's
reward is the sum of is in `reward_terms`.
"""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Row, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import EVAL, TRAIN, Record, Split
from store.schema.tables import SPLIT
from store.values.intervals import mean_interval
from store.values.rewards import ALL_TERMS, rewards, rule_of


class Evaluation(Record, frozen=True, kw_only=True):
    """Describe the evaluation of one policy version, or its work.

    `scored` of its `episodes` have a reward. `mean` is the mean of these, and the interval from
    `low` to `high` holds the expected reward with a confidence of 95 %; None: too few are scored.
    """

    policy: str
    version: int
    episodes: int
    scored: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None


# The split is written into the text, so that the index of `eval` is used.
_CURVE: Final = f"""
    WITH wholes AS (
        SELECT id FROM episodes
        WHERE {SPLIT} = '{{split}}' AND root IS NULL AND quarantined_reason IS NULL),
    parts AS (
        SELECT w.id AS whole, e.id, e.method FROM wholes w JOIN episodes e ON e.id = w.id
        UNION ALL SELECT w.id, e.id, e.method FROM wholes w JOIN episodes e ON e.root = w.id),
    sampled AS (
        SELECT DISTINCT ON (p.whole, t.policy) p.whole, t.policy, t.policy_version AS version
        FROM parts p JOIN transitions t ON t.episode_id = p.id
        WHERE t.policy IS NOT NULL AND t.policy_version IS NOT NULL
            AND (CAST(:policy AS text) IS NULL OR t.policy = :policy)
            {{and_not}}
        ORDER BY p.whole, t.policy, t.id),
    terms AS ({ALL_TERMS}),
    {rewards()}
    SELECT s.policy, s.version, count(*) AS episodes, count(r.value) AS scored,
        avg(r.value) AS mean, stddev_samp(r.value) AS spread,
        COALESCE(bool_and(r.value IN (0, 1)), false) AS zero_or_one
    FROM sampled s LEFT JOIN rewards r
        ON (r.whole, r.policy) = (s.whole, {rule_of("s.policy")})
    GROUP BY s.policy, s.version ORDER BY s.policy, s.version
    """
_CLAIMED: Final = """
    AND NOT EXISTS (SELECT FROM episode_policies c WHERE c.episode_id = p.whole
                    AND c.policy = t.policy AND c.claimed_by IS NOT NULL)
"""
_CURVES: Final[Mapping[Split, TextClause]] = {
    EVAL: text(_CURVE.format(split=EVAL, and_not=_CLAIMED)),
    TRAIN: text(_CURVE.format(split=TRAIN, and_not="")),
}


async def evaluations(connection: AsyncConnection, policy: str | None = None) -> list[Evaluation]:
    """Return the evaluation of each version of `policy` (None: of every policy) that has any."""
    return await _curve(connection, EVAL, policy)


async def rewards_of_work(connection: AsyncConnection) -> list[Evaluation]:
    """Return the rewards that each version of every policy got in episodes that may be trained."""
    return await _curve(connection, TRAIN, None)


async def _curve(connection: AsyncConnection, split: Split, policy: str | None) -> list[Evaluation]:
    rows = await connection.execute(_CURVES[split], {"policy": policy})
    return [evaluation_of(row) for row in rows]


def evaluation_of(row: Row[Any]) -> Evaluation:
    """Return the counts and the mean of rewards in a row, with their interval.

    `zero_or_one` says of the row that its rewards are all 0 or 1.
    """
    low = high = None
    if row.zero_or_one or row.scored > 1:
        low, high = mean_interval(row.mean, row.spread, row.scored, zero_or_one=row.zero_or_one)
    return Evaluation(
        policy=row.policy,
        version=row.version,
        episodes=row.episodes,
        scored=row.scored,
        mean=row.mean,
        low=low,
        high=high,
    )
