"""Write the SQL that makes rewards of statements, as `store.values.rewards` does.

A query that uses it has two parts before it in its WITH: `parts` (`whole`, `id`, `method`), the
recorded episodes of each whole one, and `terms`, the columns of `reward_terms`: the sums that are
made. `ALONE` is the policy of the sum that those have whose recipe names no metric.
"""

from typing import Final

from store.records import OWN_EPISODE, REWARD
from store.values.rewards import LARGEST

ALONE: Final = ""
COLUMNS: Final = "policy, metric, place, weight, low, high, fallback, texts"
# The sum of the metric `reward` alone, as a row of `terms`.
TERM_ALONE: Final = f"""
    SELECT '{ALONE}'::text AS policy, '{REWARD}'::text AS metric, 0 AS place,
        1::double precision AS weight, -{LARGEST}::double precision AS low,
        {LARGEST}::double precision AS high, NULL::double precision AS fallback,
        jsonb_build_object() AS texts
"""
# The sums of all policies, and the terms of one (:policy).
ALL_TERMS: Final = f"SELECT {COLUMNS} FROM reward_terms UNION ALL {TERM_ALONE}"
TERMS_OF_POLICY: Final = f"""
    SELECT {COLUMNS} FROM reward_terms WHERE policy = :policy
    UNION ALL SELECT * FROM ({TERM_ALONE}) alone
    WHERE NOT EXISTS (SELECT FROM reward_terms WHERE policy = :policy)
"""


def rule_of(policy: str) -> str:
    """Return the SQL of the policy whose terms a policy's reward is the sum of."""
    return (
        f"CASE WHEN {policy} IN (SELECT policy FROM reward_terms) THEN {policy} ELSE '{ALONE}' END"
    )


def sums(counts: str = "true") -> str:
    """Return the parts of a WITH that end in `sums`: what was said comes to, for each policy.

    A row of `sums` is about a call of a whole episode, or (`call_id` is null) about all of it.
    Feedback about the call of an episode of one call is about the episode, as in
    `store.link.settle`. `value` is null where a metric lacks that has no default: `lacks` says
    why. `first_at` is when the last of the metrics without a default was first stated, and
    `last_at` when anything was last. `counts` is the condition for a statement (`f`) of a part
    (`p`) to count.
    """
    return f"""
    said AS (
        SELECT p.whole, f.metric, f.at, f.value, f.label,
            CASE WHEN p.method <> '{OWN_EPISODE}' THEN f.call_id END AS call_id
        FROM parts p JOIN feedback f ON f.episode_id = p.id
            AND f.metric IN (SELECT metric FROM terms) AND {counts}),
    newest AS (
        SELECT DISTINCT ON (whole, call_id, metric) whole, call_id, metric, value, label,
            min(at) OVER about AS first_at, at AS last_at
        FROM said WINDOW about AS (PARTITION BY whole, call_id, metric)
        ORDER BY whole, call_id, metric, at DESC, (value IS NULL AND label IS NULL) DESC,
            value, label COLLATE "C"),
    valued AS (
        SELECT n.whole, n.call_id, n.first_at, n.last_at, t.policy, t.metric,
            CASE WHEN n.value IS NOT NULL OR t.texts ? n.label THEN GREATEST(t.low, LEAST(t.high,
                COALESCE(n.value, CAST(t.texts ->> n.label AS double precision)))) END AS value,
            n.label IS NOT NULL AND NOT t.texts ? n.label AS undeclared
        FROM newest n JOIN terms t USING (metric)),
    sums AS (
        SELECT a.whole, a.call_id, t.policy,
            CASE WHEN bool_and(v.value IS NOT NULL OR t.fallback IS NOT NULL)
                AND bool_or(v.value IS NOT NULL)
                THEN sum(t.weight * COALESCE(v.value, t.fallback) ORDER BY t.place) END AS value,
            COALESCE(
                max(v.first_at) FILTER (WHERE v.value IS NOT NULL AND t.fallback IS NULL),
                min(v.first_at) FILTER (WHERE v.value IS NOT NULL)) AS first_at,
            max(v.last_at) AS last_at,
            CASE WHEN bool_or(v.undeclared) THEN 'undeclared_text'
                WHEN bool_or(v.value IS NOT NULL) THEN 'missing_metric' END AS lacks
        FROM (SELECT DISTINCT whole, call_id, policy FROM valued) a
            JOIN terms t USING (policy)
            LEFT JOIN valued v ON (v.whole, v.policy, v.metric) = (a.whole, t.policy, t.metric)
                AND v.call_id IS NOT DISTINCT FROM a.call_id
        GROUP BY a.whole, a.call_id, t.policy)"""


def rewards(counts: str = "true") -> str:
    """Return `sums` and, after it, `rewards`: the reward of each whole episode for each policy.

    It is the one about all of it, else the mean of its calls'; a row without a value has none.
    """
    return f"""{sums(counts)},
    rewards AS (
        SELECT whole, policy,
            COALESCE(min(value) FILTER (WHERE call_id IS NULL), avg(value)) AS value
        FROM sums GROUP BY whole, policy)"""
