"""Read the rewards of evaluation: a curve over a policy's versions, with confidence intervals.

An episode of the `eval` split counts for each policy that has calls in it, at the version of that
policy's first call. Quarantined episodes are left out, and so are episodes that an update of the
policy had claimed before a call named the split `eval`: a trained episode evaluates nothing.
The rewards of the split `train` can be read in the same way. The terms of a policy's reward are in
`reward_terms`.
"""

from collections.abc import Mapping
from math import hypot
from typing import Any, Final

import msgspec
from sqlalchemy import Row, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import EVAL, TRAIN, Record, Split
from store.schema.tables import SPLIT
from store.values.intervals import Interval, mean_interval
from store.values.rewards import ALL_TERMS, rewards_sql, rule_policy_sql


class Rewards(Record, frozen=True, kw_only=True):
    """The mean reward of some episodes, and its 95 % confidence interval.

    `scored` of the `episodes` have a reward. `mean` is the mean of these, and the interval is from
    `low` to `high`; None: too few are scored.
    """

    episodes: int
    scored: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None

    def lift_over(self, old: "Rewards") -> Interval | None:
        """Return the interval of this mean minus `old`'s (Newcombe 1998, method 10).

        None: one of the two means has no interval.
        """
        if self.mean is None or self.low is None or self.high is None:
            return None
        if old.mean is None or old.low is None or old.high is None:
            return None
        lift = self.mean - old.mean
        return Interval(
            lift - hypot(self.mean - self.low, old.high - old.mean),
            lift + hypot(self.high - self.mean, old.mean - old.low),
        )


class Evaluation(Rewards, frozen=True, kw_only=True):
    """The rewards of one policy version, in evaluation or in the split `train`."""

    policy: str
    version: int


def mean_rewards_sql(rows: str, by: str) -> str:
    """Return SQL for the mean rewards of `rows`, grouped by the columns `by`.

    `rewards_from_row` reads its result. One of `rows` is an episode: its `id`, `task` and `reward`.
    `error` is that of `mean_interval`, and at least that of independent episodes; an episode
    without a task counts as a task of its own.
    """
    return f"""
    SELECT {by}, CAST(sum(episodes) AS bigint) AS episodes,
        CAST(COALESCE(sum(scored), 0) AS bigint) AS scored,
        count(total) AS tasks, max(mean) AS mean,
        sqrt(GREATEST(sum(apart), sum(within + apart / scored))) / sum(scored) AS error,
        COALESCE(bool_and(zero_or_one), false) AS zero_or_one
    FROM (
        SELECT *, (total - scored * mean) ^ 2 AS apart FROM (
            SELECT *, sum(total) OVER own / NULLIF(sum(scored) OVER own, 0) AS mean FROM (
                SELECT {by}, count(*) AS episodes, NULLIF(count(reward), 0) AS scored,
                    sum(reward) AS total, var_pop(reward) * count(reward) AS within,
                    bool_and(reward IN (0, 1)) AS zero_or_one
                FROM {rows} GROUP BY {by}, COALESCE(task, CAST(id AS text))) of_task
            WINDOW own AS (PARTITION BY {by})) of_tasks) of_groups
    GROUP BY {by}"""


# The split is written into the text, so that the index of `eval` is used.
_CURVE: Final = f"""
    WITH wholes AS (
        SELECT id, COALESCE(joined_task, task) AS task FROM episodes
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
    {rewards_sql()},
    rewarded AS (
        SELECT s.policy, s.version, w.id, w.task, r.value AS reward
        FROM sampled s JOIN wholes w ON w.id = s.whole
            LEFT JOIN rewards r ON (r.whole, r.policy) = (s.whole, {rule_policy_sql("s.policy")}))
    {mean_rewards_sql("rewarded", "policy, version")} ORDER BY policy, version
    """
_CLAIMED: Final = """
    AND NOT EXISTS (SELECT FROM episode_policies c WHERE c.episode_id = p.whole
                    AND c.policy = t.policy AND c.claimed_by IS NOT NULL)
"""
_CURVES: Final[Mapping[Split, TextClause]] = {
    EVAL: text(_CURVE.format(split=EVAL, and_not=_CLAIMED)),
    TRAIN: text(_CURVE.format(split=TRAIN, and_not="")),
}


async def rewards_by_version(
    connection: AsyncConnection, policy: str | None = None, split: Split = EVAL
) -> list[Evaluation]:
    """Return the rewards of `policy`'s versions (None: of all) that have episodes of `split`."""
    rows = await connection.execute(_CURVES[split], {"policy": policy})
    return [
        Evaluation(
            policy=row.policy, version=row.version, **msgspec.structs.asdict(rewards_from_row(row))
        )
        for row in rows
    ]


def rewards_from_row(row: Row[Any]) -> Rewards:
    """Return counts and mean of the rewards in a row of `mean_rewards_sql`, with their interval."""
    interval = None
    if row.scored:
        interval = mean_interval(
            row.mean, row.scored, row.tasks, row.error, zero_or_one=row.zero_or_one
        )
    low, high = interval or (None, None)
    return Rewards(episodes=row.episodes, scored=row.scored, mean=row.mean, low=low, high=high)
