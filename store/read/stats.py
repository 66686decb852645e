"""Count what is stored, for the display and summary of `pawl demo` and `pawl example`."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import Record


class PolicyTotals(Record, frozen=True, kw_only=True):
    """Totals of one policy (None: of calls without one); `versions` excludes the base model."""

    policy: str | None
    calls: int
    side_calls: int
    trainable_calls: int
    failed_calls: int
    versions: int
    trained_episodes: int


_POLICY_TOTALS = text(
    """
    SELECT t.policy, t.calls, t.side_calls, t.trainable_calls, t.failed_calls,
      (SELECT count(*) FROM policies p WHERE p.name = t.policy AND p.version > 0) AS versions,
      (SELECT count(*) FROM consumptions c
        WHERE c.policy = t.policy AND c.trained) AS trained_episodes
    FROM (SELECT policy, count(*) AS calls, count(side) AS side_calls,
            count(*) FILTER (WHERE trainable) AS trainable_calls,
            count(*) FILTER (WHERE status <> 'complete' OR http_status <> 200) AS failed_calls
          FROM transitions GROUP BY policy) t
    ORDER BY t.policy
    """
)


async def policy_totals(connection: AsyncConnection) -> list[PolicyTotals]:
    """Count the stored calls, versions and trained episodes of each policy."""
    rows = await connection.execute(_POLICY_TOTALS)
    return [PolicyTotals(**row._mapping) for row in rows]
