"""Delete what was said about calls and episodes, with the requests that nothing is left of."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from store.deleting.names import Named
from store.ids import lowest_id_at

# Statements whose target had not arrived when they were stored.
_UNMATCHED: Final = """
    DELETE FROM {table} s USING unnest($1::text[], $2::text[]) AS n (kind, name)
    WHERE s.episode_id IS NULL AND s.target_kind = n.kind AND s.target = n.name
    RETURNING s.at
"""
_MATCHED: Final = "DELETE FROM {table} s WHERE s.episode_id = ANY($1) RETURNING s.at"
# A request's statements have its time, and all their ids are made within moments of it, so that
# their primary keys find them. Two requests of one microsecond keep each other, which is harmless.
_EMPTY: Final = """
    DELETE FROM feedback_requests r
    WHERE r.at = $1 AND r.id >= $2 AND r.id < $3
        AND NOT EXISTS (SELECT FROM feedback f WHERE f.request_id = r.id)
        AND NOT EXISTS (SELECT FROM tool_events e WHERE e.at = $1 AND e.id >= $2 AND e.id < $3
                        AND e.target_kind IS NOT NULL)
    RETURNING r.idempotency_key
"""
_KEYS: Final = "DELETE FROM feedback_keys WHERE idempotency_key = ANY($1) RETURNING 1"
BEFORE: Final = timedelta(seconds=1)
AFTER: Final = timedelta(hours=1)


async def forget_unmatched(driver: Any, names: Sequence[Named]) -> dict[str, int]:
    """Delete statements about targets that never arrived; return how many rows, by table."""
    columns = [list(column) for column in zip(*names, strict=True)] if names else [[], []]
    return await _forget(driver, _UNMATCHED, columns)


async def forget_matched(driver: Any, episode_ids: Sequence[UUID]) -> dict[str, int]:
    """Delete what was said about these episodes; return how many rows, by table."""
    return await _forget(driver, _MATCHED, [list(episode_ids)])


async def _forget(driver: Any, query: str, values: Sequence[Any]) -> dict[str, int]:
    feedback = await driver.fetch(query.format(table="feedback"), *values)
    events = await driver.fetch(query.format(table="tool_events"), *values)
    moments = {row[0] for row in (*feedback, *events)}
    requests, keys = await _forget_requests(driver, moments)
    return {
        "feedback": len(feedback),
        "tool_events": len(events),
        "feedback_requests": requests,
        "feedback_keys": keys,
    }


async def _forget_requests(driver: Any, moments: Iterable[datetime]) -> tuple[int, int]:
    """Delete the requests of these times that no statement is left of, and their keys."""
    requests, keys = 0, list[str]()
    for at in sorted(moments):
        bounds = lowest_id_at(at - BEFORE), lowest_id_at(at + AFTER)
        gone = await driver.fetch(_EMPTY, at, *bounds)
        requests += len(gone)
        keys += [row[0] for row in gone if row[0] is not None]
    return requests, len(await driver.fetch(_KEYS, keys)) if keys else 0
