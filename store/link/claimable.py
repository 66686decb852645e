"""Score episodes, and keep `episode_policies` in step with episodes and their parts.

An episode's reward is the metric `reward`, or for policies whose recipe names metrics a sum of
these. The terms of such sums are in `reward_terms`, because the ingester knows no recipe.
`scored_at` is when the episode first had a reward of its own. `call_scored_at` is when a call of it
last got a reward: such rewards come while the episode still goes on.

Every score and every row of `episode_policies` is computed from all stored records of its episode,
so neither the order of arrival nor a repetition changes it
(docs/decisions/041-several-policies.md). Code that changes an episode computes them in the same
transaction, and so holds the lock on the episode's row.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final
from uuid import UUID

from sqlalchemy import delete, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import driver_of
from store.driver import Driver
from store.records import CallRecord
from store.schema.tables import CLAIMABLE, reward_terms
from store.values.rewards import (
    ALL_TERMS,
    REWARD_ALONE,
    TERM_ALONE,
    TERM_COLUMNS,
    RewardRule,
    RewardTerm,
    metric_sums_sql,
    rule_policy_sql,
)

# Number of episodes that are scored at once after a change of the rule.
SCORED_AT_ONCE: Final = 5000
_PARTS: Final = """
    parts AS (
        SELECT w.id AS whole, e.id, e.method FROM wholes w JOIN episodes e ON e.id = w.id
        UNION ALL SELECT w.id, e.id, e.method FROM wholes w JOIN episodes e ON e.root = w.id)
"""
_TIMES: Final = """
    min(s.first_at) FILTER (WHERE s.call_id IS NULL AND s.value IS NOT NULL) AS scored_at,
    max(s.last_at) FILTER (WHERE s.call_id IS NOT NULL AND s.value IS NOT NULL) AS call_scored_at,
    min(s.value) FILTER (WHERE s.call_id IS NULL) AS reward
"""
# A part keeps its own score beside that of the whole, so that the join can be undone.
_SCORE_EPISODES: Final = f"""
    WITH wholes AS (
        SELECT DISTINCT COALESCE(root, id) AS id FROM episodes WHERE id = ANY($1)
        UNION SELECT unnest($1)),
    {_PARTS},
    terms AS ({TERM_ALONE}),
    {metric_sums_sql()},
    scores AS (
        SELECT w.id, {_TIMES} FROM wholes w LEFT JOIN sums s ON s.whole = w.id GROUP BY w.id)
    UPDATE episodes e
    SET scored_at = s.scored_at, call_scored_at = s.call_scored_at, reward = s.reward
    FROM scores s
    WHERE e.id = s.id AND (e.scored_at, e.call_scored_at, e.reward)
        IS DISTINCT FROM (s.scored_at, s.call_scored_at, s.reward)
"""
_SCORE_SUMS: Final = f"""
    WITH wanted AS (
        SELECT episode_id AS id, policy FROM episode_policies
        WHERE episode_id = ANY($1) AND policy IN (SELECT policy FROM reward_terms)),
    wholes AS (SELECT DISTINCT id FROM wanted),
    {_PARTS},
    terms AS (SELECT {TERM_COLUMNS} FROM reward_terms),
    {metric_sums_sql()},
    scores AS (
        SELECT w.id, w.policy, {_TIMES},
            CASE WHEN count(s.value) = 0 THEN COALESCE(
                min(s.lacks) FILTER (WHERE s.call_id IS NULL), max(s.lacks)) END AS lacks
        FROM wanted w LEFT JOIN sums s ON (s.whole, s.policy) = (w.id, w.policy)
        GROUP BY w.id, w.policy)
    UPDATE episode_policies p SET scored_at = s.scored_at, call_scored_at = s.call_scored_at,
        reward = s.reward, lacks = s.lacks
    FROM scores s
    WHERE (p.episode_id, p.policy) = (s.id, s.policy)
        AND (p.scored_at, p.call_scored_at, p.reward, p.lacks)
            IS DISTINCT FROM (s.scored_at, s.call_scored_at, s.reward, s.lacks)
"""
# By policy, how many statements came after the claim of an update that trained on their episode.
# Only statements of metrics that count for the policy's reward are included.
_COUNT_LATE: Final = f"""
    SELECT c.policy, count(*) AS late
    FROM feedback f JOIN episodes e ON e.id = f.episode_id
        JOIN consumptions c ON c.episode_id = COALESCE(e.root, e.id) AND c.trained
        JOIN updates u ON u.id = c.update_id AND u.claimed_at < f.at
    WHERE f.id = ANY($1) AND ({rule_policy_sql("c.policy")}, f.metric) IN (
        SELECT policy, metric FROM ({ALL_TERMS}) terms)
    GROUP BY c.policy
"""
_HAS_TERMS: Final = "SELECT EXISTS (SELECT FROM reward_terms)"
# Episodes with feedback; all others have no score by any rule.
_WITH_FEEDBACK: Final = text(
    """
    SELECT p.episode_id FROM episode_policies p
    WHERE p.policy = :policy AND p.episode_id > :after AND (
        EXISTS (SELECT FROM feedback f WHERE f.episode_id = p.episode_id)
        OR EXISTS (SELECT FROM episodes e JOIN feedback f ON f.episode_id = e.id
                   WHERE e.root = p.episode_id))
    ORDER BY p.episode_id LIMIT :most
    """
)
_COPY_EPISODE_SCORES: Final = text(
    """
    UPDATE episode_policies p SET scored_at = e.scored_at, call_scored_at = e.call_scored_at,
        reward = e.reward, lacks = NULL
    FROM episodes e
    WHERE e.id = p.episode_id AND p.policy = :policy
        AND (p.scored_at, p.call_scored_at, p.reward, p.lacks)
            IS DISTINCT FROM (e.scored_at, e.call_scored_at, e.reward, NULL)
    """
)
_LOCK_TERMS: Final = text("LOCK TABLE reward_terms IN ACCESS EXCLUSIVE MODE")
_MISSING_REWARDS: Final = text(
    """
    SELECT lacks, count(*) AS episodes FROM episode_policies
    WHERE policy = :policy AND lacks IS NOT NULL AND claimed_by IS NULL AND claimable
    GROUP BY lacks
    """
)


async def score_episodes(driver: Driver, ids: Iterable[UUID]) -> None:
    """Recompute the scores of these episodes, and of the episodes that they are parts of."""
    await driver.execute(_SCORE_EPISODES, list(ids))


async def score_metric_sums(driver: Driver, ids: Iterable[UUID]) -> None:
    """Recompute these episodes' rewards for the policies whose reward is a sum of metrics."""
    if await driver.fetchval(_HAS_TERMS):
        await driver.execute(_SCORE_SUMS, list(ids))


async def count_late_feedback(driver: Driver, feedback: list[UUID]) -> dict[str, int]:
    """Count, by policy, the rewards in `feedback` that came too late to be trained on.

    A reward is too late once an update that trains on its episode has claimed it.
    """
    return {row[0]: row[1] for row in await driver.fetch(_COUNT_LATE, feedback)}


async def set_reward_rule(connection: AsyncConnection, policy: str, rule: RewardRule) -> bool:
    """Set the rule of a policy's rewards; return whether it changed.

    Stored feedback is scored anew by the rule. This function and transactions that store records
    wait for each other.
    """
    if await reward_rule(connection, policy) == rule:
        return False
    await connection.execute(_LOCK_TERMS)
    await connection.execute(delete(reward_terms).where(reward_terms.c.policy == policy))
    if rule == REWARD_ALONE:
        await connection.execute(_COPY_EPISODE_SCORES, {"policy": policy})
        return True
    await connection.execute(insert(reward_terms), _term_rows(policy, rule))
    await _score_all(connection, policy)
    return True


def _term_rows(policy: str, rule: RewardRule) -> list[dict[str, Any]]:
    return [
        {
            "policy": policy,
            "place": place,
            "metric": term.metric,
            "weight": term.weight,
            "low": term.low,
            "high": term.high,
            "fallback": term.default,
            "texts": dict(term.texts),
        }
        for place, term in enumerate(rule.terms)
    ]


async def _score_all(connection: AsyncConnection, policy: str) -> None:
    driver = await driver_of(connection)
    await connection.execute(
        text(
            "UPDATE episode_policies SET scored_at = NULL, call_scored_at = NULL, reward = NULL"
            " WHERE policy = :policy AND (scored_at, call_scored_at) IS DISTINCT FROM (NULL, NULL)"
        ),
        {"policy": policy},
    )
    values = {"policy": policy, "after": UUID(int=0), "most": SCORED_AT_ONCE}
    while ids := (await connection.execute(_WITH_FEEDBACK, values)).scalars().all():
        await driver.execute(_SCORE_SUMS, list(ids))
        values["after"] = ids[-1]


async def reward_rule(connection: AsyncConnection, policy: str) -> RewardRule:
    query = select(reward_terms).where(reward_terms.c.policy == policy)
    rows = (await connection.execute(query.order_by(reward_terms.c.place))).all()
    if not rows:
        return REWARD_ALONE
    return RewardRule(
        terms=tuple(
            RewardTerm(
                metric=row.metric,
                weight=row.weight,
                low=row.low,
                high=row.high,
                default=row.fallback,
                texts=row.texts,
            )
            for row in rows
        )
    )


async def count_missing_rewards(connection: AsyncConnection, policy: str) -> dict[str, int]:
    """Count, by reason, the unclaimed episodes with feedback but no reward for `policy`."""
    rows = await connection.execute(_MISSING_REWARDS, {"policy": policy})
    return {row.lacks: row.episodes for row in rows}


_NAMES: Final = (
    "task",
    "scored_at",
    "call_scored_at",
    "reward",
    "failed",
    "last_call_at",
    "claimable",
)
# Columns that a policy with reward terms of its own does not copy.
_SCORES: Final = ("scored_at", "call_scored_at", "reward")
_COPIED: Final = ", ".join(_NAMES)
_OLD_VALUES: Final = ", ".join(f"p.{name}" for name in _NAMES)


def _score_columns(policy: str, own: str) -> str:
    """Return SQL for the values of `_NAMES`: those of the episode (`f`).

    For a policy with reward terms the scores are `own`, a template with `{name}`.
    """
    return ", ".join(
        f"CASE WHEN {policy} IN (SELECT policy FROM reward_terms) THEN {own.format(name=name)}"
        f" ELSE f.{name} END"
        if name in _SCORES
        else f"f.{name}"
        for name in _NAMES
    )


_NEW_VALUES: Final = _score_columns("p.policy", "p.{name}")
# The last part of a joined episode decides whether the episode failed. The time of its last call is
# the latest of all parts.
_FACTS: Final = f"""
    SELECT e.id, COALESCE(e.joined_task, e.task) AS task, e.scored_at, e.call_scored_at,
        e.reward,
        CASE WHEN l.last_call_id > e.last_call_id THEN l.failed ELSE e.failed END AS failed,
        GREATEST(e.last_call_at, l.last_call_at) AS last_call_at, {CLAIMABLE} AS claimable
    FROM episodes e LEFT JOIN LATERAL (
        SELECT max(p.last_call_at) AS last_call_at,
            (array_agg(p.last_call_id ORDER BY p.last_call_id DESC))[1] AS last_call_id,
            (array_agg(p.failed ORDER BY p.last_call_id DESC))[1] AS failed
        FROM episodes p WHERE e.linked AND p.root = e.id) l ON true
    WHERE e.id = ANY($1)
"""
_ADD_ROWS: Final = f"""
    INSERT INTO episode_policies (episode_id, policy, own_version, own_latest, version, latest,
        {_COPIED})
    SELECT episode_id, policy, lowest, highest, lowest, highest, {_score_columns("policy", "NULL")}
    FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::integer[])
            AS said (episode_id, policy, lowest, highest)
        JOIN ({_FACTS}) f ON f.id = said.episode_id
    ON CONFLICT (episode_id, policy) DO UPDATE SET
        own_version = LEAST(episode_policies.own_version, excluded.own_version),
        own_latest = GREATEST(episode_policies.own_latest, excluded.own_latest),
        version = LEAST(episode_policies.version, excluded.version),
        latest = GREATEST(episode_policies.latest, excluded.latest)
    WHERE episode_policies.own_version IS NULL
        OR episode_policies.own_version > excluded.own_version
        OR episode_policies.own_latest < excluded.own_latest
    RETURNING episode_id, policy IN (SELECT policy FROM reward_terms) AS has_sum
"""
_REFRESH: Final = f"""
    UPDATE episode_policies p SET ({_COPIED}) = ROW({_NEW_VALUES}) FROM ({_FACTS}) f
    WHERE p.episode_id = f.id AND ({_OLD_VALUES}) IS DISTINCT FROM ({_NEW_VALUES})
"""
_WHOLES: Final = "SELECT DISTINCT COALESCE(root, id) FROM episodes WHERE id = ANY($1)"
# A joined episode has a row for each policy of its parts.
_SHARE_ROWS: Final = f"""
    INSERT INTO episode_policies (episode_id, policy, version, latest, {_COPIED})
    SELECT sampled.id, policy, version, latest, {_score_columns("policy", "NULL")}
    FROM (SELECT COALESCE(e.root, e.id) AS id, p.policy, min(p.own_version) AS version,
              max(p.own_latest) AS latest
          FROM episodes e JOIN episode_policies p ON p.episode_id = e.id
          WHERE (e.id = ANY($1) OR e.root = ANY($1)) AND p.own_version IS NOT NULL
          GROUP BY 1, 2) sampled
        JOIN ({_FACTS}) f ON f.id = sampled.id
    ON CONFLICT (episode_id, policy) DO UPDATE SET
        version = excluded.version, latest = excluded.latest
    WHERE (episode_policies.version, episode_policies.latest)
        <> (excluded.version, excluded.latest)
"""
# Rows that an earlier join added, of policies that no part has any more.
_DROP_SHARED_ROWS: Final = """
    DELETE FROM episode_policies p
    WHERE p.episode_id = ANY($1) AND p.own_version IS NULL AND p.claimed_by IS NULL
        AND NOT EXISTS (
            SELECT FROM episodes e JOIN episode_policies o ON o.episode_id = e.id
            WHERE e.root = p.episode_id AND o.policy = p.policy AND o.own_version IS NOT NULL)
"""


async def add_policy_rows(
    driver: Driver, calls: Iterable[tuple[CallRecord, UUID]], changed: list[UUID]
) -> None:
    """Add a row for each policy that served one of `calls`, and refresh the rows of `changed`.

    `calls` are pairs of a call and its episode's id. A call without a version adds no row: an
    outside model or a fixed policy served it. `changed` are the ids of the calls' episodes that
    were stored before and are not linked to others.
    """
    served: defaultdict[tuple[UUID, str], list[int]] = defaultdict(list)
    for call, episode_id in calls:
        if call.policy is not None and call.policy_version is not None:
            served[episode_id, call.policy].append(call.policy_version)
    rows = [(*key, min(versions), max(versions)) for key, versions in sorted(served.items())]
    added = await driver.fetch(_ADD_ROWS, *map(list, zip(*rows, strict=True))) if rows else []
    if with_sums := [row[0] for row in added if row[1]]:
        # Their episodes may have been scored before the policy served a call.
        await score_metric_sums(driver, with_sums)
    if changed:
        await driver.execute(_REFRESH, changed)


async def share_policies(driver: Driver, linked: Iterable[UUID]) -> None:
    """Give the joined episodes of these parts one row for each policy of any of their parts."""
    ids = list(linked)
    await driver.execute(_DROP_SHARED_ROWS, ids)
    await driver.execute(_SHARE_ROWS, await _wholes_of_parts(driver, ids))


async def refresh_with_wholes(driver: Driver, ids: Iterable[UUID]) -> None:
    """Refresh the policy rows of these episodes, and of the episodes that they are parts of."""
    wanted = list(ids)
    ids = [*wanted, *await _wholes_of_parts(driver, wanted)]
    await driver.execute(_REFRESH, ids)
    await score_metric_sums(driver, ids)


async def _wholes_of_parts(driver: Driver, ids: list[UUID]) -> list[UUID]:
    return [row[0] for row in await driver.fetch(_WHOLES, ids)]


async def refresh_policy_rows(connection: AsyncConnection, ids: Iterable[UUID]) -> None:
    """Copy these episodes' facts into their `episode_policies` rows; recompute summed rewards."""
    driver, wanted = await driver_of(connection), list(ids)
    await driver.execute(_REFRESH, wanted)
    await score_metric_sums(driver, wanted)
