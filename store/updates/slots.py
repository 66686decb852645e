"""Count the versions that need a model server's adapter slots, and make room for one more.

Versions of all policies of one base model share the server. A version needs a slot while it may
have traffic, and one that is being made reserves it
(docs/decisions/055-measured-staleness-paced-publishing.md).
"""

from math import inf
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import Record

_HERE: Final = """
    SELECT other.name FROM policies own
    JOIN policies other ON other.version = 0 AND other.served_name = own.served_name
    WHERE own.name = :policy AND own.version = 0
"""
# How many versions that were retired last tell how long one is kept after it lost the traffic.
RECENT: Final = 8
# Until the transaction ends: two trainers that share a server must not both take the last slot.
_LOCK: Final = text("SELECT pg_advisory_xact_lock(hashtext('pawl-adapter-slots'))")
# What a trainer that is gone has left half-done reserves nothing for ever.
_LIVE: Final = text(
    f"""
    WITH here AS ({_HERE}),
    versions AS (
        SELECT state, changed_at,
            lead(created_at) OVER (PARTITION BY name ORDER BY version) AS next_at
        FROM policies
        WHERE version > 0 AND name IN (SELECT name FROM here) AND state <> 'rejected'),
    last_retired AS (
        SELECT LEAST(changed_at - next_at, make_interval(secs => :longest_s)) AS tail
        FROM versions WHERE state = 'retired'
        ORDER BY changed_at DESC LIMIT {RECENT}),
    making AS (
        SELECT FROM updates WHERE state = 'running' AND policy IN (SELECT name FROM here)
            AND claimed_at > now() - make_interval(secs => :longest_s))
    SELECT count(*) FILTER (WHERE state IN ('serving', 'ready')) AS serving,
        count(*) FILTER (WHERE state = 'published') AS published,
        count(*) FILTER (WHERE state = 'retired'
            AND changed_at > now() - make_interval(secs => :unload_s)) AS unloading,
        count(*) FILTER (WHERE state = 'written'
            AND changed_at > now() - make_interval(secs => :longest_s))
            + (SELECT count(*) FROM making) AS coming,
        COALESCE((SELECT extract(epoch FROM avg(tail)) FROM last_retired), 0) AS tail_s,
        (SELECT extract(epoch FROM now() - max(claimed_at)) FROM updates
            WHERE policy IN (SELECT name FROM here) AND version IS NOT NULL) AS since_s
    FROM versions
    """
)
_RETIRE: Final = text(
    f"""
    UPDATE policies SET state = 'retired', changed_at = now()
    WHERE state = 'published' AND (name, version) = (
        SELECT name, version FROM policies
        WHERE version > 0 AND state = 'published' AND name IN ({_HERE})
            AND changed_at < now() - make_interval(secs => :longest_s)
        ORDER BY changed_at, name, version LIMIT 1)
    RETURNING served_name
    """
)


class Live(Record, frozen=True, kw_only=True):
    """How many trained versions of one model server need an adapter slot.

    `serving` have the traffic or wait for it with others, `published` are kept for episodes that
    began with them, `unloading` were retired so lately that a proxy may not know it, and `coming`
    are being made or wait to be loaded.

    Those that were retired last were kept for `tail_s` seconds after they lost the traffic, of each
    no more than one may be kept; the update that made the newest version was claimed `since_s`
    seconds ago.
    """

    serving: int
    published: int
    unloading: int
    coming: int
    tail_s: float = 0.0
    since_s: float = inf

    @property
    def total(self) -> int:
        """Return how many slots are taken or reserved."""
        return self.serving + self.published + self.unloading + self.coming


def free_slots(live: Live, slots: int) -> int:
    """Return how many more versions may be made for a server with `slots` adapter slots.

    A server with fewer than what serves and one more could never have any: there the next version
    waits only until nothing else is left.
    """
    return max(0, max(slots, live.serving + 1) - live.total)


def due_in(live: Live, slots: int) -> float:
    """Return in how many seconds it is time for the next version: 0 if it is.

    The first half of the slots that do not serve is taken at once, the others at even intervals.
    Else all would be taken in a row, and nothing could be published until they are free in a row.
    """
    others = max(1, slots - live.serving)
    if 2 * free_slots(live, slots) >= others:
        return 0.0
    return max(0.0, live.tail_s / others - live.since_s)


def is_due(live: Live, slots: int) -> bool:
    """Return whether it is time for the next version."""
    return due_in(live, slots) <= 0.0


async def lock_slots(connection: AsyncConnection) -> None:
    """Let nobody else reserve a slot until the transaction ends."""
    await connection.execute(_LOCK)


async def live_versions(
    connection: AsyncConnection, policy: str, unload_s: float, longest_s: float
) -> Live:
    """Return what needs a slot of the model server that `policy` is served by.

    A version is `unloading` for `unload_s` seconds; what is `coming` counts for `longest_s`.
    """
    values = {"policy": policy, "unload_s": unload_s, "longest_s": longest_s}
    row = (await connection.execute(_LIVE, values)).one()
    return Live(
        serving=row.serving,
        published=row.published,
        unloading=row.unloading,
        coming=row.coming,
        tail_s=float(row.tail_s),
        since_s=inf if row.since_s is None else float(row.since_s),
    )


async def retire_longest(connection: AsyncConnection, policy: str, longest_s: float) -> str | None:
    """Retire the version that lost the traffic first, if that was `longest_s` seconds ago.

    Its episodes go on with the version that serves. Return its served name, or None.
    """
    values = {"policy": policy, "longest_s": longest_s}
    name: str | None = (await connection.execute(_RETIRE, values)).scalar()
    return name
