"""Count the versions that need a model server's adapter slots, and find one that gives its up.

Versions of all policies of one base model share the server. A version needs a slot while it may
have traffic, and one that is being made reserves it
(docs/decisions/022-off-policy.md).
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import Record
from store.schema.tables import AT_ONCE, BACK_TO, LIVE
from store.versions import VERSION_COLUMNS, PolicyVersion, version_of

_HERE: Final = """
    SELECT other.name FROM policies own
    JOIN policies other ON other.version = 0 AND other.served_name = own.served_name
    WHERE own.name = :policy AND own.version = 0
"""
# How many versions that were unloaded last tell how long one is kept after it lost the traffic.
RECENT: Final = 8
# Until the transaction ends: two trainers that share a server must not both take the last slot.
_LOCK: Final = text(
    """
    SELECT pg_advisory_xact_lock(hashtext('pawl-adapter-slots:' || served_name))
    FROM policies WHERE name = :policy AND version = 0
    """
)
# What a trainer that is gone has left half-done reserves nothing for ever; nor does a policy that
# nobody has configured any more, once nobody calls it either. What was unloaded is read by index,
# and no further than needed: there are as many as there ever were updates.
_LIVE: Final = text(
    f"""
    WITH here AS ({_HERE}),
    needed AS (
        SELECT name FROM here
        WHERE CAST(:known AS text[]) IS NULL OR name = ANY(CAST(:known AS text[])) OR EXISTS (
            SELECT FROM episodes e
            JOIN episode_policies s ON s.episode_id = e.id AND s.policy = here.name
            WHERE e.last_call_at > now() - make_interval(secs => :longest_s))),
    versions AS (
        SELECT name, state, changed_at, {AT_ONCE} AS at_once,
            state = 'retired' AND version = {BACK_TO.format(name="p.name")} AS is_held
        FROM policies p
        WHERE version > 0 AND name IN (SELECT name FROM here) AND {LIVE}),
    newest_unloaded AS (
        SELECT LEAST(changed_at - next_at, make_interval(secs => :longest_s)) AS tail
        FROM here CROSS JOIN LATERAL (
            SELECT changed_at, (
                SELECT created_at FROM policies later
                WHERE later.name = here.name AND later.version > own.version
                    AND later.state <> 'rejected'
                ORDER BY later.version LIMIT 1) AS next_at
            FROM policies own
            WHERE own.name = here.name AND unloaded_at IS NOT NULL
            ORDER BY changed_at DESC LIMIT {RECENT}) unloaded
        ORDER BY changed_at DESC LIMIT {RECENT}),
    making AS (
        SELECT FROM updates WHERE state = 'running' AND policy IN (SELECT name FROM here)
            AND claimed_at > now() - make_interval(secs => :longest_s)),
    newest_made AS (
        SELECT claimed_at FROM here CROSS JOIN LATERAL (
            SELECT claimed_at FROM updates WHERE policy = here.name AND version IS NOT NULL
            ORDER BY claimed_at DESC LIMIT 1) made)
    SELECT count(*) FILTER (WHERE state = 'serving' AND is_needed) AS serving,
        count(*) FILTER (WHERE state = 'loaded' AND at_once AND is_needed) AS ready,
        (SELECT count(*) FROM policies WHERE state = 'loaded' AND {AT_ONCE} AND name <> :policy
            AND name = ANY(CAST(:together AS text[]))) AS partners_ready,
        count(*) FILTER (WHERE state = 'canary' OR state = 'loaded' AND NOT at_once) AS gated,
        count(*) FILTER (WHERE is_held AND is_needed) AS held,
        count(*) FILTER (WHERE state IN ('retired', 'rolled_back') AND is_held IS NOT TRUE) AS kept,
        (SELECT count(*) FROM policies
            WHERE name IN (SELECT name FROM here) AND unloaded_at IS NOT NULL
                AND changed_at > now() - make_interval(secs => :unload_s)) AS unloading,
        count(DISTINCT name) FILTER (WHERE state = 'written'
            AND changed_at > now() - make_interval(secs => :longest_s))
            + (SELECT count(*) FROM making) AS coming,
        COALESCE((SELECT extract(epoch FROM avg(tail)) FROM newest_unloaded), 0) AS tail_s,
        (SELECT extract(epoch FROM now() - max(claimed_at)) FROM newest_made) AS since_s
    FROM (SELECT *, name IN (SELECT name FROM needed) AS is_needed FROM versions) live
    """
)
_LONGEST: Final = text(
    f"""
    SELECT {VERSION_COLUMNS} FROM policies p
    WHERE version > 0 AND state IN ('retired', 'rolled_back') AND {LIVE} AND name IN ({_HERE})
        AND version IS DISTINCT FROM {BACK_TO.format(name="p.name")} AND share IS NULL
        AND changed_at < now() - make_interval(secs => :longest_s)
    ORDER BY changed_at, name, version LIMIT 1
    """
)


class Live(Record, frozen=True, kw_only=True):
    """Count the trained versions of one model server that need an adapter slot.

    `serving` have the traffic, `ready` wait for it until others go live with them, and `gated` are
    tried, or wait to be. `held` are those that a roll-back would give the traffic to, and `kept`
    all others that episodes began with. `unloading` were unloaded so lately that a proxy may not
    know it, and `coming` are being made or wait to be loaded. `partners_ready` of those that are
    ready wait for the policy itself.

    Those that were unloaded last were kept for `tail_s` seconds after they lost the traffic, of
    each no more than one may be kept; the update that made the newest version was claimed `since_s`
    seconds ago.
    """

    serving: int
    kept: int
    unloading: int
    coming: int
    held: int = 0
    ready: int = 0
    gated: int = 0
    partners_ready: int = 0
    tail_s: float = 0.0
    since_s: float = inf

    @property
    def total(self) -> int:
        """Return how many slots are taken or reserved."""
        waiting = self.ready + self.gated + self.coming
        return self.serving + waiting + self.held + self.kept + self.unloading


def free_slots(live: Live, slots: int) -> int:
    """Return how many more versions may be made for a server with `slots` adapter slots.

    A server with fewer than what serves, what it would go back to, what is decided about, and one
    more could never have any: there the next version waits only until nothing else is left.
    """
    never_free = live.serving + live.ready + live.held + live.gated
    return max(0, max(slots, never_free + 1) - live.total)


def needed_slots(live: Live, slots: int, together: int) -> int:
    """Return how many slots must be free for a version of one of `together` policies.

    The first of those that go live together needs room for all: else it would wait for the others'
    in vain. A server that can never have so many free is content with what it can have.
    """
    if live.partners_ready:
        return 1
    return max(1, min(together, slots - live.serving - live.held))


def due_in(live: Live, slots: int) -> float:
    """Return in how many seconds it is time for the next version: 0 if it is.

    The first half of the slots that are not taken for good is taken at once, the others at even
    intervals. Else all would be taken in a row, and nothing could be loaded until they are free in
    a row. What others wait for, to go live with it, is due.
    """
    if live.partners_ready:
        return 0.0
    others = max(1, slots - live.serving - live.held)
    if 2 * free_slots(live, slots) >= others:
        return 0.0
    return max(0.0, live.tail_s / others - live.since_s)


async def lock_slots(connection: AsyncConnection, policy: str) -> None:
    """Let nobody else reserve a slot of the policy's model server until the transaction ends."""
    await connection.execute(_LOCK, {"policy": policy})


async def live_versions(
    connection: AsyncConnection,
    policy: str,
    unload_s: float,
    longest_s: float,
    together: Sequence[str] = (),
    known: Sequence[str] | None = None,
) -> Live:
    """Return what needs a slot of the model server that `policy` is served by.

    A version is `unloading` for `unload_s` seconds; what is `coming` counts for `longest_s`.
    `together` are the policies that go live with this one. `known` are those that are configured
    (None: all): what serves for another needs a slot for as long as it was called `longest_s` ago
    or less.
    """
    values = {
        "policy": policy,
        "unload_s": unload_s,
        "longest_s": longest_s,
        "together": list(together),
        "known": None if known is None else list(known),
    }
    row = (await connection.execute(_LIVE, values)).one()
    since_s = inf if row.since_s is None else float(row.since_s)
    return Live(**{**row._mapping, "tail_s": float(row.tail_s), "since_s": since_s})


async def longest_kept(
    connection: AsyncConnection, policy: str, longest_s: float
) -> PolicyVersion | None:
    """Return the version of the server that lost the traffic first, if that was `longest_s` ago.

    It is kept for its episodes alone.
    """
    values = {"policy": policy, "longest_s": longest_s}
    row = (await connection.execute(_LONGEST, values)).first()
    return None if row is None else version_of(row)
