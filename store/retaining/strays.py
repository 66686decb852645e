"""Remove outdated statements about what never came, and requests that nothing is left of."""

from datetime import date
from typing import Any, Final

from store.retaining.periods import Cuts
from store.retaining.tenant_cuts import id_at, midnight, parameters, with_cut

_STRAY: Final = """
    DELETE FROM {table} WHERE id IN (
        SELECT s.id FROM {table} s {with_cut}
        WHERE s.episode_id IS NULL AND s.at < cut.at LIMIT $6)
"""
# Whose a request without a key was, nobody knows once its statements are gone.
_REQUESTS: Final = f"""
    DELETE FROM feedback_requests WHERE id IN (
        SELECT r.id FROM feedback_requests r {with_cut("r.idempotency_key")}
        WHERE r.id < $6 AND r.at < $7 AND (r.idempotency_key IS NULL OR r.at < cut.at)
            AND NOT EXISTS (SELECT FROM feedback f WHERE f.request_id = r.id)
        ORDER BY r.id LIMIT $8)
"""


async def remove_strays(driver: Any, cuts: Cuts, latest: date, most: int) -> int:
    """Remove at most so many of each, in the driver's transaction; return how many in all.

    Args:
        driver: the driver's connection.
        cuts: the first day of which each tenant's records are kept.
        latest: the last of these days.
        most: how many rows of one kind are removed.
    """
    values = parameters(cuts)
    done = [
        await driver.execute(
            _STRAY.format(table=table, with_cut=with_cut("s.target")), *values, most
        )
        for table in ("feedback", "tool_events")
    ]
    done.append(await driver.execute(_REQUESTS, *values, id_at(latest), midnight(latest), most))
    return sum(int(status.rpartition(" ")[2]) for status in done)
