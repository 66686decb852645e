"""Count everything stored."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import Record


class Totals(Record, frozen=True, kw_only=True):
    """Count calls and episodes over everything stored.

    An episode counts as consumed, or trained, once for each policy that consumed it.
    """

    calls: int
    episodes: int
    consumed_episodes: int
    trained_episodes: int
    trained_unscored_episodes: int
    twice_consumed_episodes: int


_TOTALS = text(
    """
    SELECT
      (SELECT count(*) FROM transitions) AS calls,
      (SELECT count(*) FROM episodes WHERE root IS NULL AND deleted_at IS NULL) AS episodes,
      (SELECT count(*) FROM consumptions) AS consumed_episodes,
      (SELECT count(*) FROM consumptions WHERE trained) AS trained_episodes,
      (SELECT count(*) FROM consumptions c JOIN episodes e ON e.id = c.episode_id
            JOIN episode_policies p ON (p.episode_id, p.policy) = (c.episode_id, c.policy)
        WHERE c.trained AND p.scored_at IS NULL
            AND p.call_scored_at IS NULL AND e.deleted_at IS NULL) AS trained_unscored_episodes,
      (SELECT count(*) FROM (SELECT episode_id FROM consumptions
        GROUP BY episode_id, policy HAVING count(*) > 1) twice) AS twice_consumed_episodes
    """
)


async def totals(connection: AsyncConnection) -> Totals:
    """Count all stored calls and episodes."""
    row = (await connection.execute(_TOTALS)).one()
    return Totals(**row._mapping)
