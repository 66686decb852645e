"""Exclude episodes from training that lost a call before it could be kept."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from store.ids import new_id, time_of
from store.link.claimable import refresh_wholes
from store.records import OWN_EPISODE, GapRecord

LOST_CALL = "a call of this episode was lost: its record could not be written to disk"

# The episode may have no other call, now or later. It gets a row all the same, with the reason.
_MARK = f"""
    INSERT INTO episodes (id, key, method, task_named, first_call_id, last_call_id,
                          last_call_at, doubtful, quarantined_reason)
    SELECT id, key, '{OWN_EPISODE}', false, call, call, at, true, '{LOST_CALL}'
    FROM unnest($1::uuid[], $2::text[], $3::uuid[], $4::timestamptz[]) AS g (id, key, call, at)
    ON CONFLICT (key) DO UPDATE SET doubtful = true,
        quarantined_reason = LEAST(episodes.quarantined_reason, excluded.quarantined_reason)
    RETURNING id, linked
"""


async def mark_gaps(driver: Any, gaps: Sequence[GapRecord]) -> list[UUID]:
    """Exclude these episodes from training, in the driver's current transaction.

    Return those that are linked to others, which are to be excluded with them.
    """
    keys = {key: gap for gap in gaps for key in gap.episodes}
    rows = [(new_id(), key, gap.id, time_of(gap.id)) for key, gap in sorted(keys.items())]
    if not rows:
        return []
    marked = await driver.fetch(_MARK, *map(list, zip(*rows, strict=True)))
    await refresh_wholes(driver, [row[0] for row in marked])
    return [row[0] for row in marked if row[1]]
