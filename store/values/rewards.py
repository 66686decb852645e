"""Compute rewards from feedback, as weighted sums of metrics: in Python, and in SQL (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from math import fsum, isnan
from typing import Final, Literal

from store.records import OWN_EPISODE, REWARD, Feedback, Record

# The largest absolute value of feedback that is accepted. Squares and sums of rewards stay finite.
LARGEST: Final = 1e15
NO_TEXTS: Final[Mapping[str, float]] = {}
NO_PARTS: Final[Mapping[str, float]] = {}
# Why an episode or call has no reward although it has feedback.
Lack = Literal["missing_metric", "undeclared_text"]


class RewardTerm(Record, frozen=True, kw_only=True):
    """One metric's part of a reward: `weight` times its value, clipped to `low` and `high`.

    `default` is the value if the metric was not stated; None: then there is no reward. `texts` has
    the values of texts that may be stated instead of numbers.
    """

    metric: str
    weight: float = 1.0
    low: float = -LARGEST
    high: float = LARGEST
    default: float | None = None
    texts: Mapping[str, float] = NO_TEXTS

    def value_of(self, stated: float | str | None) -> float | None:
        """Return the clipped, unweighted value of a stated number or text; None if it has none."""
        value = self.texts.get(stated) if isinstance(stated, str) else stated
        return None if value is None or isnan(value) else max(self.low, min(self.high, value))


class RewardRule(Record, frozen=True, kw_only=True):
    """The terms whose sum is the reward, in the order in which they are added."""

    terms: tuple[RewardTerm, ...]

    @property
    def range(self) -> tuple[float, float]:
        """Return the lowest and the highest possible reward."""
        ends = [sorted((term.weight * term.low, term.weight * term.high)) for term in self.terms]
        return fsum(low for low, _ in ends), fsum(high for _, high in ends)


# The rule if a recipe names no metric.
REWARD_ALONE: Final = RewardRule(terms=(RewardTerm(metric=REWARD),))


class Reward(Record, frozen=True, kw_only=True):
    """The reward of an episode or call; `value` is None if it has none.

    `parts` has what each metric adds to `value`; it is empty for the metric `reward` alone. `lacks`
    says why there is no reward although a metric was stated. `source` names a judge whose opinion
    counts in it (the last by name, if there are several); None: all statements are facts.
    """

    value: float | None = None
    parts: Mapping[str, float] = NO_PARTS
    lacks: Lack | None = None
    source: str | None = None


UNSCORED: Final = Reward()


def newest_statement(statements: Iterable[Feedback], metric: str) -> Feedback | None:
    """Return the statement of `metric` that counts, or None if there is none.

    It is the newest fact; without a fact, or if the newest was withdrawn, the newest statement of
    all. Of several with the same time a withdrawal comes before a number, a lower number before a
    higher one, and a number before a text: the result must not depend on the order of arrival.
    """
    own = [item for item in statements if item.metric == metric]
    fact = _latest([item for item in own if item.source is None])
    return fact if fact is not None and fact.value is not None else _latest(own)


def _latest(statements: Sequence[Feedback]) -> Feedback | None:
    at = max((item.at for item in statements), default=None)
    return min((item for item in statements if item.at == at), key=_rank, default=None)


def _rank(item: Feedback) -> tuple[int, float, str, str]:
    source = item.source or ""
    if item.value is None:
        return 0, 0.0, "", source
    value = item.value
    return (2, 0.0, value, source) if isinstance(value, str) else (1, value, "", source)


def reward_of(statements: Iterable[Feedback], rule: RewardRule) -> Reward:
    """Return the reward that `rule` computes from the statements about one target.

    It has a value if each metric without a default was stated, and at least one metric was.
    """
    all_statements = list(statements)
    newest = [newest_statement(all_statements, term.metric) for term in rule.terms]
    stated = [
        None if one is None else term.value_of(one.value)
        for term, one in zip(rule.terms, newest, strict=True)
    ]
    values = [
        term.default if value is None else value
        for term, value in zip(rule.terms, stated, strict=True)
    ]
    if all(value is None for value in stated) or any(value is None for value in values):
        return Reward(lacks=_why_no_reward(newest, stated))
    parts = {
        term.metric: term.weight * value
        for term, value in zip(rule.terms, values, strict=True)
        if value is not None
    }
    return Reward(
        value=fsum(parts.values()),
        parts=parts if rule != REWARD_ALONE else NO_PARTS,
        source=max((one.source for one in newest if one is not None and one.source), default=None),
    )


def _why_no_reward(
    newest: Iterable[Feedback | None], stated: Iterable[float | None]
) -> Lack | None:
    """Return why a target has no reward; None if no statement counts."""
    values = list(stated)
    for one, value in zip(newest, values, strict=True):
        if one is not None and isinstance(one.value, str) and value is None:
            return "undeclared_text"
    return "missing_metric" if any(value is not None for value in values) else None


# The same in SQL, for stored feedback. A query that uses it defines two tables before it in its
# WITH: `parts` (`whole`, `id`, `method`), the parts of each episode, and `terms`, the terms to sum,
# with the columns of `reward_terms`. `WITHOUT_TERMS` stands for all policies whose recipe names no
# metric.

WITHOUT_TERMS: Final = ""
TERM_COLUMNS: Final = "policy, metric, place, weight, low, high, fallback, texts"
# The only term of the policy `WITHOUT_TERMS`, as a row of `terms`: the metric `reward`.
TERM_ALONE: Final = f"""
    SELECT '{WITHOUT_TERMS}'::text AS policy, '{REWARD}'::text AS metric, 0 AS place,
        1::double precision AS weight, -{LARGEST}::double precision AS low,
        {LARGEST}::double precision AS high, NULL::double precision AS fallback,
        jsonb_build_object() AS texts
"""
# The terms of all policies, and of one (:policy).
ALL_TERMS: Final = f"SELECT {TERM_COLUMNS} FROM reward_terms UNION ALL {TERM_ALONE}"
TERMS_OF_POLICY: Final = f"""
    SELECT {TERM_COLUMNS} FROM reward_terms WHERE policy = :policy
    UNION ALL SELECT * FROM ({TERM_ALONE}) alone
    WHERE NOT EXISTS (SELECT FROM reward_terms WHERE policy = :policy)
"""


def rule_policy_sql(policy: str) -> str:
    """Return SQL for the policy whose terms apply: `policy` if it has any, else `WITHOUT_TERMS`."""
    return (
        f"CASE WHEN {policy} IN (SELECT policy FROM reward_terms) THEN {policy}"
        f" ELSE '{WITHOUT_TERMS}' END"
    )


def metric_sums_sql(counts: str = "true") -> str:
    """Return parts of a WITH; the last, `sums`, has the rewards of episodes and calls by policy.

    A row of `sums` is about a call of an episode, or (`call_id` is null) about the episode itself.
    Feedback about the call of an episode with the method `own` is about the episode. `value` is
    null if there is no reward: `lacks` says why. `first_at` is when the last of the metrics without
    a default was first stated (if all have defaults: when the first metric was), and `last_at` is
    the time of the newest statement. A statement (`f`) about a part (`p`) counts if `counts` holds.
    """
    return f"""
    said AS (
        SELECT p.whole, f.metric, f.at, NULLIF(f.value, 'NaN') AS value, f.label, f.source,
            CASE WHEN p.method <> '{OWN_EPISODE}' THEN f.call_id END AS call_id
        FROM parts p JOIN feedback f ON f.episode_id = p.id
            AND f.metric IN (SELECT metric FROM terms) AND {counts}),
    ranked AS (
        SELECT *, value IS NULL AND label IS NULL AS withdrawn, min(at) OVER about AS first_at,
            row_number() OVER (
                PARTITION BY whole, call_id, metric, source IS NULL
                ORDER BY at DESC, (value IS NULL AND label IS NULL) DESC, value,
                    label COLLATE "C", source COLLATE "C") AS place
        FROM said WINDOW about AS (PARTITION BY whole, call_id, metric)),
    newest AS (
        SELECT DISTINCT ON (whole, call_id, metric) whole, call_id, metric, value, label,
            first_at, at AS last_at
        FROM ranked WHERE place = 1
        ORDER BY whole, call_id, metric, (source IS NULL AND NOT withdrawn) DESC, at DESC,
            withdrawn DESC, value, label COLLATE "C"),
    valued AS (
        SELECT n.whole, n.call_id, n.first_at, n.last_at, t.policy, t.metric,
            CASE WHEN n.value IS NOT NULL OR t.texts ? n.label THEN GREATEST(t.low, LEAST(t.high,
                COALESCE(n.value, CAST(t.texts ->> n.label AS double precision)))) END AS value,
            n.label IS NOT NULL AND NOT t.texts ? n.label AS undeclared
        FROM newest n JOIN terms t USING (metric)),
    of_terms AS (
        SELECT v.whole, v.call_id, policy, t.place, t.weight, t.fallback,
            max(v.value) FILTER (WHERE v.metric = t.metric) AS value,
            max(v.first_at) FILTER (WHERE v.metric = t.metric) AS first_at,
            max(v.last_at) AS last_at, bool_or(v.undeclared) AS undeclared
        FROM valued v JOIN terms t USING (policy)
        GROUP BY v.whole, v.call_id, policy, t.place, t.weight, t.fallback),
    sums AS (
        SELECT whole, call_id, policy,
            CASE WHEN bool_and(value IS NOT NULL OR fallback IS NOT NULL)
                AND bool_or(value IS NOT NULL)
                THEN sum(weight * COALESCE(value, fallback) ORDER BY place) END AS value,
            COALESCE(
                max(first_at) FILTER (WHERE value IS NOT NULL AND fallback IS NULL),
                min(first_at) FILTER (WHERE value IS NOT NULL)) AS first_at,
            max(last_at) AS last_at,
            CASE WHEN bool_or(undeclared) THEN 'undeclared_text'
                WHEN bool_or(value IS NOT NULL) THEN 'missing_metric' END AS lacks
        FROM of_terms GROUP BY whole, call_id, policy)"""


def rewards_sql(counts: str = "true") -> str:
    """Return SQL as `metric_sums_sql`, and `rewards`: each whole episode's reward by policy.

    It is the reward of the episode itself, else the mean of its calls' rewards; null: none.
    """
    return f"""{metric_sums_sql(counts)},
    rewards AS (
        SELECT whole, policy,
            COALESCE(min(value) FILTER (WHERE call_id IS NULL), avg(value)) AS value
        FROM sums GROUP BY whole, policy)"""
