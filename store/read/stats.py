"""Count everything stored, for the display and summary of `pawl demo` and `pawl example`."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import EVAL, Record
from store.schema.tables import SPLIT


class Totals(Record, frozen=True, kw_only=True):
    """Count calls and episodes over everything stored.

    An episode counts as consumed, or trained, once for each policy that consumed it.
    """

    calls: int
    trainable_calls: int
    episodes: int
    consumed_episodes: int
    trained_episodes: int
    trained_unscored_episodes: int
    twice_consumed_episodes: int
    eval_episodes: int
    consumed_eval_episodes: int


_TOTALS = text(
    f"""
    SELECT
      (SELECT count(*) FROM transitions) AS calls,
      (SELECT count(*) FROM transitions WHERE trainable) AS trainable_calls,
      (SELECT count(*) FROM episodes WHERE root IS NULL AND deleted_at IS NULL) AS episodes,
      (SELECT count(*) FROM consumptions) AS consumed_episodes,
      (SELECT count(*) FROM consumptions WHERE trained) AS trained_episodes,
      (SELECT count(*) FROM consumptions c JOIN episodes e ON e.id = c.episode_id
            JOIN episode_policies p ON (p.episode_id, p.policy) = (c.episode_id, c.policy)
        WHERE c.trained AND p.scored_at IS NULL
            AND p.call_scored_at IS NULL AND e.deleted_at IS NULL) AS trained_unscored_episodes,
      (SELECT count(*) FROM (SELECT episode_id FROM consumptions
        GROUP BY episode_id, policy HAVING count(*) > 1) twice) AS twice_consumed_episodes,
      (SELECT count(*) FROM episodes
        WHERE root IS NULL AND deleted_at IS NULL AND {SPLIT} = '{EVAL}') AS eval_episodes,
      (SELECT count(*) FROM consumptions c JOIN episodes e ON e.id = c.episode_id
        WHERE {SPLIT} = '{EVAL}') AS consumed_eval_episodes
    """
)


async def totals(connection: AsyncConnection) -> Totals:
    """Count all stored calls and episodes."""
    row = (await connection.execute(_TOTALS)).one()
    return Totals(**row._mapping)


class PolicyTotals(Record, frozen=True, kw_only=True):
    """Count what is stored of one policy; versions are those that an update made."""

    policy: str
    calls: int
    trainable_calls: int
    failed_calls: int
    versions: int
    trained_episodes: int


_POLICY_TOTALS = text(
    """
    SELECT t.policy, t.calls, t.trainable_calls, t.failed_calls,
      (SELECT count(*) FROM policies p WHERE p.name = t.policy AND p.version > 0) AS versions,
      (SELECT count(*) FROM consumptions c
        WHERE c.policy = t.policy AND c.trained) AS trained_episodes
    FROM (SELECT policy, count(*) AS calls, count(*) FILTER (WHERE trainable) AS trainable_calls,
            count(*) FILTER (WHERE status <> 'complete' OR http_status <> 200) AS failed_calls
          FROM transitions WHERE policy IS NOT NULL GROUP BY policy) t
    ORDER BY t.policy
    """
)


async def policy_totals(connection: AsyncConnection) -> list[PolicyTotals]:
    """Count the stored calls of each policy, and what came of them."""
    rows = await connection.execute(_POLICY_TOTALS)
    return [PolicyTotals(**row._mapping) for row in rows]
