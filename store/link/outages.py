"""Exclude episodes from training that lost a call, or may have lost one, before it was stored.

A gap is a lost call of known episodes. An outage is a time in which one worker lost records of
unknown episodes.

An episode may have lost a call in an outage if it had a call before the outage's end and one after
its beginning. The first or last call may be the lost one, so an outage is extended by `SLACK` at
both ends. Any worker of any proxy may have stored the other calls, so only the times can be
compared (docs/decisions/032-bad-disks.md).

The time spans of episodes and outages only grow, and the quarantine is computed from both. So
neither the order of arrival nor a repetition changes it.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from store.driver import Driver
from store.ids import lowest_id_at, new_id, time_of
from store.link.claimable import refresh_with_wholes
from store.records import OWN_EPISODE, GapRecord, OutageRecord

# The assumed longest time between two calls of an episode: how long tools and people may take, and
# how far the clocks of several proxies may differ.
SLACK: Final = timedelta(hours=1)
# Any other reason is more precise. `LEAST` prefers it, whatever the order of arrival.
IN_OUTAGE: Final = "calls may have been lost while this episode was under way: a disk was full"

# Most episodes that one transaction quarantines because of an outage. A long outage has many, and
# other transactions wait for their rows and for the settle lock.
MOST_QUARANTINED: Final = 1000

# The id of the first call of some episodes, and the time of their last call.
Span = tuple[UUID, datetime]

# An outage is stored like a row of `fault_times`: bounds for an episode's last call and for the id
# of its first.
_STORE_OUTAGES: Final = """
    INSERT INTO recording_outages AS known (id, called_since, began_before)
    SELECT * FROM unnest($1::uuid[], $2::timestamptz[], $3::uuid[])
    ON CONFLICT (id) DO UPDATE SET
        called_since = LEAST(known.called_since, excluded.called_since),
        began_before = GREATEST(known.began_before, excluded.began_before)
"""
_UNDER_WAY: Final = "e.last_call_at >= l.called_since AND e.first_call_id < l.began_before"
# The first condition does not depend on the episode: PostgreSQL evaluates it once, and reads no
# episode where there is no outage near the batch.
EPISODES_IN_OUTAGE: Final = f"""
    SELECT e.id, e.linked FROM episodes e
    WHERE EXISTS (SELECT FROM recording_outages WHERE began_before > $2 AND called_since <= $3)
        AND e.id = ANY($1) AND NOT e.doubtful
        AND EXISTS (SELECT FROM recording_outages l WHERE {_UNDER_WAY})
"""
# An episode in several of these outages is in the result several times.
_SOME_UNDER_WAY: Final = f"""
    SELECT e.id, e.linked FROM recording_outages l JOIN episodes e ON {_UNDER_WAY}
    WHERE l.id = ANY($1) AND NOT e.doubtful LIMIT $2
"""
_QUARANTINE: Final = f"""
    UPDATE episodes SET doubtful = true,
        quarantined_reason = LEAST(quarantined_reason, '{IN_OUTAGE}')
    WHERE id = ANY($1)
"""


async def store_outages(driver: Driver, outages: Sequence[OutageRecord]) -> list[UUID]:
    """Store outages in the driver's current transaction, and return their ids.

    A stored outage is extended if a later record of it is longer.
    """
    rows = [
        (one.id, one.since - SLACK, lowest_id_at(one.until + SLACK))
        for one in sorted(outages, key=lambda one: (one.id, one.until))
    ]
    # A statement may not change a row twice.
    for row in rows:
        await driver.execute(_STORE_OUTAGES, *([value] for value in row))
    return [row[0] for row in rows]


async def find_in_outage(
    driver: Driver, episodes: Sequence[UUID], span: Span | None
) -> dict[UUID, bool]:
    """Return which of `episodes` were under way in an outage and are not quarantined for it yet.

    The dict maps each to whether it is linked to other episodes. `span` is from the earliest first
    call to the latest last call of `episodes`, or None if there are none.
    """
    rows = [] if span is None else await driver.fetch(EPISODES_IN_OUTAGE, episodes, *span)
    return {row[0]: row[1] for row in rows}


async def find_under_way(driver: Driver, outages: Sequence[UUID]) -> dict[UUID, bool]:
    """Return at most `MOST_QUARANTINED` episodes that were under way in one of `outages`.

    The result is like that of `find_in_outage`.
    """
    return {
        row[0]: row[1] for row in await driver.fetch(_SOME_UNDER_WAY, outages, MOST_QUARANTINED)
    }


async def quarantine_for_outage(driver: Driver, episodes: Sequence[UUID]) -> None:
    """Quarantine these episodes because of an outage; the caller holds locks on their rows."""
    await driver.execute(_QUARANTINE, episodes)


# Gaps

LOST_CALL = "a call of this episode was lost: its record could not be written to disk"

# The episode may have no other call, now or later. It gets a row all the same, with the reason.
_MARK_GAPS = f"""
    INSERT INTO episodes (id, key, method, task_named, first_call_id, last_call_id,
                          last_call_at, doubtful, quarantined_reason)
    SELECT id, key, '{OWN_EPISODE}', false, call, call, at, true, '{LOST_CALL}'
    FROM unnest($1::uuid[], $2::text[], $3::uuid[], $4::timestamptz[]) AS g (id, key, call, at)
    ON CONFLICT (key) DO UPDATE SET doubtful = true,
        quarantined_reason = LEAST(episodes.quarantined_reason, excluded.quarantined_reason)
    RETURNING id, linked
"""


async def quarantine_for_gaps(driver: Driver, gaps: Sequence[GapRecord]) -> list[UUID]:
    """Exclude the episodes that lost a call from training, in the driver's current transaction.

    Return the ids of those that are linked to other episodes, which have to be excluded, too.
    """
    keys = {key: gap for gap in gaps for key in gap.episodes}
    rows = [(new_id(), key, gap.id, time_of(gap.id)) for key, gap in sorted(keys.items())]
    if not rows:
        return []
    marked = await driver.fetch(_MARK_GAPS, *map(list, zip(*rows, strict=True)))
    await refresh_with_wholes(driver, [row[0] for row in marked])
    return [row[0] for row in marked if row[1]]
