"""Score episodes: by the metric `reward`, and for policies with a sum of their own by that.

What such a sum is made of is in `reward_terms`, because whoever stores feedback knows no recipe.
Every score is computed from all that was said, so neither the order of arrival nor a repetition
changes it (`store.values.rewards`). `scored_at` is the time of the first reward. For rewards of
single calls it is the newest, because they come while the episode still goes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import delete, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import driver_of
from store.records import REWARD
from store.schema.tables import reward_terms
from store.values.rewards import (
    ALL_TERMS,
    COLUMNS,
    REWARD_ALONE,
    TERM_ALONE,
    RewardRule,
    RewardTerm,
    rule_of,
    sums,
)

# Scores of so many episodes are computed at once, as a rule changes.
AT_ONCE: Final = 5000
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
    {sums()},
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
    terms AS (SELECT {COLUMNS} FROM reward_terms),
    {sums()},
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
# Of what an update had trained on without it, by policy, as far as it counts for that one's reward.
_LATE: Final = f"""
    SELECT c.policy, count(*) AS late
    FROM feedback f JOIN episodes e ON e.id = f.episode_id
        JOIN consumptions c ON c.episode_id = COALESCE(e.root, e.id) AND c.trained
        JOIN updates u ON u.id = c.update_id AND u.claimed_at < f.at
    WHERE f.id = ANY($1) AND ({rule_of("c.policy")}, f.metric) IN (
        SELECT policy, metric FROM ({ALL_TERMS}) terms)
    GROUP BY c.policy
"""
_ARE_SUMS: Final = "SELECT EXISTS (SELECT FROM reward_terms)"
# Those of which anything was said; all others have no score by any rule.
_SPOKEN_OF: Final = text(
    """
    SELECT p.episode_id FROM episode_policies p
    WHERE p.policy = :policy AND p.episode_id > :after AND (
        EXISTS (SELECT FROM feedback f WHERE f.episode_id = p.episode_id)
        OR EXISTS (SELECT FROM episodes e JOIN feedback f ON f.episode_id = e.id
                   WHERE e.root = p.episode_id))
    ORDER BY p.episode_id LIMIT :most
    """
)
_AS_EPISODES: Final = text(
    """
    UPDATE episode_policies p SET scored_at = e.scored_at, call_scored_at = e.call_scored_at,
        reward = e.reward, lacks = NULL
    FROM episodes e
    WHERE e.id = p.episode_id AND p.policy = :policy
        AND (p.scored_at, p.call_scored_at, p.reward, p.lacks)
            IS DISTINCT FROM (e.scored_at, e.call_scored_at, e.reward, NULL)
    """
)
_WAIT_FOR_ALL: Final = text("LOCK TABLE reward_terms IN ACCESS EXCLUSIVE MODE")
_LACKING: Final = text(
    """
    SELECT lacks, count(*) AS episodes FROM episode_policies
    WHERE policy = :policy AND lacks IS NOT NULL AND claimed_by IS NULL AND claimable
    GROUP BY lacks
    """
)


async def score_episodes(driver: Any, ids: Iterable[UUID]) -> None:
    """Compute the scores of these episodes anew, and of the wholes that they are parts of."""
    await driver.execute(_SCORE_EPISODES, list(ids))


async def score_sums(driver: Any, ids: Iterable[UUID]) -> None:
    """Compute anew what these episodes earned by the sums of policies that have one."""
    if await driver.fetchval(_ARE_SUMS):
        await driver.execute(_SCORE_SUMS, list(ids))


async def count_late(driver: Any, feedback: list[UUID]) -> dict[str, int]:
    """Return how much of this feedback an update had trained without, by policy."""
    return {row[0]: row[1] for row in await driver.fetch(_LATE, feedback)}


async def set_reward_rule(connection: AsyncConnection, policy: str, rule: RewardRule) -> bool:
    """Let a policy's rewards be made by `rule` from now on; return whether that is another rule.

    All that was said already is counted by it, too. It waits for those who store something, and
    they for it.
    """
    if await reward_rule(connection, policy) == rule:
        return False
    await connection.execute(_WAIT_FOR_ALL)
    await connection.execute(delete(reward_terms).where(reward_terms.c.policy == policy))
    if rule == REWARD_ALONE:
        await connection.execute(_AS_EPISODES, {"policy": policy})
        return True
    await connection.execute(insert(reward_terms), _rows(policy, rule))
    await _score_all(connection, policy)
    return True


def _rows(policy: str, rule: RewardRule) -> list[dict[str, Any]]:
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
    after, is_unfinished = UUID(int=0), True
    while is_unfinished:
        values = {"policy": policy, "after": after, "most": AT_ONCE}
        ids: Sequence[UUID] = (await connection.execute(_SPOKEN_OF, values)).scalars().all()
        is_unfinished = bool(ids)
        if is_unfinished:
            await driver.execute(_SCORE_SUMS, list(ids))
            after = ids[-1]


async def reward_rule(connection: AsyncConnection, policy: str) -> RewardRule:
    """Return what a policy's reward is the sum of."""
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


async def judged_by(
    connection: AsyncConnection, policy: str, gate: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rule `gate` for a version, with the digest of what its rewards are made by now."""
    return dict(gate) | {REWARD: (await reward_rule(connection, policy)).digest}


async def lacking(connection: AsyncConnection, policy: str) -> dict[str, int]:
    """Return of how many free episodes something was said without a reward for `policy`, by why."""
    rows = await connection.execute(_LACKING, {"policy": policy})
    return {row.lacks: row.episodes for row in rows}
