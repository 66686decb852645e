"""Count the versions that need a model server's adapter slots, and find versions to unload.

All policies of one base model share the server. A version needs a slot while it has traffic or
episodes of it are under way, and a version that is being made reserves a slot
(docs/decisions/022-off-policy.md).
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.records import EVAL, Record
from store.schema.tables import LIVE, PROMOTED_WHEN_LOADED, ROLLBACK_TARGET
from store.version_states import mark_unloaded
from store.versions import Actor

# A running update and a written version reserve a slot no longer than this: trainer or controller
# may be gone.
RESERVED_S: Final = 3600.0
# A version that lost the traffic this long ago may be unloaded although its episodes go on: they
# continue with the serving version. By then its calls have ended, or the model server is silent.
LONGEST_KEPT_S: Final = 600.0
# The usual duration of a call, and the usual time from one call to the next, are this quantile over
# at most `SAMPLED_EPISODES` episodes of the last `SAMPLED_UPDATES` updates, or `DEFAULT_USUAL_S` if
# there are none.
USUAL_QUANTILE: Final = 0.99
SAMPLED_UPDATES: Final = 8
SAMPLED_EPISODES: Final = 128
DEFAULT_USUAL_S: Final = 30.0

_POLICIES_OF_SERVER: Final = """
    SELECT other.name FROM policies own
    JOIN policies other ON other.version = 0 AND other.served_name = own.served_name
    WHERE own.name = :policy AND own.version = 0
"""
# Locked until the transaction ends: two trainers that share a server must not take the same slot.
_LOCK: Final = text(
    """
    SELECT pg_advisory_xact_lock(hashtext('pawl-adapter-slots:' || served_name))
    FROM policies WHERE name = :policy AND version = 0
    """
)
# Running updates and written versions expire. A policy that is not
# configured any more needs slots for serving, ready and held versions only while it is called.
_LIVE: Final = text(
    f"""
    WITH here AS ({_POLICIES_OF_SERVER}),
    needed AS (
        SELECT name FROM here
        WHERE CAST(:known AS text[]) IS NULL OR name = ANY(CAST(:known AS text[])) OR EXISTS (
            SELECT FROM episodes e
            JOIN episode_policies s ON s.episode_id = e.id AND s.policy = here.name
            WHERE e.last_call_at > now() - make_interval(secs => {RESERVED_S}))),
    versions AS (
        SELECT name, state, changed_at, {PROMOTED_WHEN_LOADED} AS at_once,
            state = 'retired' AND version = {ROLLBACK_TARGET.format(name="p.name")} AS is_held
        FROM policies p
        WHERE version > 0 AND name IN (SELECT name FROM here) AND {LIVE}),
    making AS (
        SELECT FROM updates WHERE state = 'running' AND policy IN (SELECT name FROM here)
            AND claimed_at > now() - make_interval(secs => {RESERVED_S}))
    SELECT count(*) FILTER (WHERE state = 'serving' AND is_needed) AS serving,
        count(*) FILTER (WHERE state = 'loaded' AND at_once AND is_needed) AS ready,
        (SELECT count(*) FROM policies WHERE state = 'loaded' AND {PROMOTED_WHEN_LOADED}
            AND name <> :policy AND name = ANY(CAST(:together AS text[]))) AS partners_ready,
        count(*) FILTER (WHERE state = 'canary' OR state = 'loaded' AND NOT at_once) AS gated,
        count(*) FILTER (WHERE is_held AND is_needed) AS held,
        count(*) FILTER (WHERE state IN ('retired', 'rolled_back') AND is_held IS NOT TRUE) AS kept,
        count(DISTINCT name) FILTER (WHERE state = 'written'
            AND changed_at > now() - make_interval(secs => {RESERVED_S}))
            + (SELECT count(*) FROM making) AS coming
    FROM (SELECT *, name IN (SELECT name FROM needed) AS is_needed FROM versions) live
    """
)
# The database sees a call only once it has ended. So a call is assumed to be open for a call's
# usual duration: after a version lost the traffic, and after an episode's usual pause. An episode
# is under way with the highest version that it called, and with any version that served it lately
# (a lower one, after a roll-back). A reward does not end an episode of evaluation: others of the
# same version follow. A version that an operator recalled waits to be promoted.
_KEPT: Final = text(
    f"""
    WITH kept AS MATERIALIZED (
        SELECT name, version, served_name, changed_at, EXISTS (
                SELECT FROM policy_events v WHERE v.name = p.name AND v.version = p.version
                    AND v.to_state = v.from_state AND v.at >= p.changed_at) AS is_recalled
        FROM policies p
        WHERE version > 0 AND state IN ('retired', 'rolled_back') AND {LIVE} AND share IS NULL
            AND (CAST(:policy AS text) IS NULL OR name IN ({_POLICIES_OF_SERVER}))
            AND version IS DISTINCT FROM {ROLLBACK_TARGET.format(name="p.name")}),
    usual AS MATERIALIZED (
        SELECT name, pause.*
        FROM (SELECT DISTINCT name FROM kept) own CROSS JOIN LATERAL (
            SELECT COALESCE(percentile_cont({USUAL_QUANTILE}) WITHIN GROUP (ORDER BY call_s),
                    {DEFAULT_USUAL_S}) AS call_s,
                COALESCE(percentile_cont({USUAL_QUANTILE}) WITHIN GROUP (ORDER BY since_s),
                    {DEFAULT_USUAL_S}) AS pause_s
            FROM (
                SELECT t.total_ms / 1000 AS call_s, extract(epoch FROM t.started_at
                    - lag(t.started_at) OVER (PARTITION BY taken.id ORDER BY t.id)) AS since_s
                FROM (
                    SELECT c.episode_id AS id FROM (
                        SELECT id FROM updates WHERE policy = own.name AND state = 'done'
                        ORDER BY claimed_at DESC LIMIT {SAMPLED_UPDATES}) newest
                    JOIN consumptions c ON c.update_id = newest.id LIMIT {SAMPLED_EPISODES}) taken
                JOIN episodes e ON e.id = taken.id OR e.root = taken.id
                JOIN transitions t ON t.episode_id = e.id AND t.id >= e.first_call_id
            ) calls) pause),
    lately AS MATERIALIZED (
        SELECT s.policy AS name, s.latest AS version, e.id, e.last_call_at
        FROM episodes e JOIN episode_policies s ON s.episode_id = COALESCE(e.root, e.id)
        WHERE e.last_call_at > now() - make_interval(secs => {LONGEST_KEPT_S})
            AND s.policy IN (SELECT name FROM kept)
            AND (s.scored_at IS NULL OR e.split = '{EVAL}')),
    used AS MATERIALIZED (
        SELECT name, version, last_call_at FROM lately
        UNION ALL
        SELECT kept.name, kept.version, t.started_at FROM lately
            JOIN transitions t ON t.episode_id = lately.id AND t.id >= :first
            JOIN kept ON kept.name = t.policy AND kept.version = t.policy_version)
    SELECT name, version, served_name,
        extract(epoch FROM changed_at - now()) + {LONGEST_KEPT_S} AS at_most_s,
        is_recalled OR changed_at > now() - make_interval(secs => call_s) OR EXISTS (
            SELECT FROM used WHERE used.name = kept.name AND used.version = kept.version
                AND last_call_at > now() - make_interval(secs => pause_s + call_s)
        ) AS is_under_way
    FROM kept JOIN usual USING (name)
    ORDER BY is_under_way, changed_at, name, version
    """
)


class LiveCounts(Record, frozen=True, kw_only=True):
    """Counts of the trained versions that need an adapter slot of one model server.

    `serving` versions have the traffic. `ready` ones wait until other policies go live with them.
    `gated` ones are canaries, or wait for a trial or an approval. `held` ones would serve after a
    roll-back. `kept` ones only serve episodes that already use them. `coming` ones are being made
    or wait to be loaded. `partners_ready` are loaded versions of other policies that wait for this
    policy.
    """

    serving: int
    kept: int
    coming: int
    held: int = 0
    ready: int = 0
    gated: int = 0
    partners_ready: int = 0

    @property
    def total(self) -> int:
        """Return how many slots are taken or reserved."""
        return self.serving + self.ready + self.gated + self.coming + self.held + self.kept


class VersionKeptForEpisodes(Record, frozen=True, kw_only=True):
    """A version that a model server keeps only for the episodes that use it.

    It may be unloaded once no such episode `is_under_way`, or in `at_most_s` seconds at the latest.
    """

    name: str
    version: int
    served_name: str
    is_under_way: bool
    at_most_s: float

    @property
    def may_be_unloaded(self) -> bool:
        """Return whether the version may be unloaded, to give its slot to another."""
        return not self.is_under_way or self.at_most_s <= 0.0


def free_slots(live: LiveCounts, slots: int) -> int:
    """Return how many more versions may be made for a server with `slots` adapter slots.

    A result below 0 means that there are too many versions. A server needs a slot for each serving,
    ready, held and gated version, and one for a new version. If `slots` is smaller, the needed
    number is used instead: then a new version waits only for the kept and coming ones.
    """
    never_free = live.serving + live.ready + live.held + live.gated
    return max(slots, never_free + 1) - live.total


def needed_slots(live: LiveCounts, slots: int, together: int) -> int:
    """Return how many free slots a new version needs, if `together` policies go live together.

    The first new version needs a slot for each of these policies, as it goes live only with their
    versions. Once a partner's version is ready, one slot is enough. The result is at most what the
    server can ever have free.
    """
    if live.partners_ready:
        return 1
    return max(1, min(together, slots - live.serving - live.held))


async def lock_slots(connection: AsyncConnection, policy: str) -> None:
    """Lock the slots of the policy's model server until the transaction ends; wait for the lock."""
    await connection.execute(_LOCK, {"policy": policy})


async def count_live_versions(
    connection: AsyncConnection,
    policy: str,
    together: Sequence[str] = (),
    known: Sequence[str] | None = None,
) -> LiveCounts:
    """Count the versions that need a slot of the model server of `policy`.

    `together` are the policies that go live with this one. `known` are the configured policies.
    Serving, ready and held versions of other policies count only if the policy was called in the
    last `RESERVED_S` seconds (`known` None: they always count).
    """
    values = {
        "policy": policy,
        "together": list(together),
        "known": None if known is None else list(known),
    }
    return LiveCounts(**(await connection.execute(_LIVE, values)).one()._mapping)


async def versions_kept_for_episodes(
    connection: AsyncConnection, policy: str | None
) -> list[VersionKeptForEpisodes]:
    """Return the versions that the model server of `policy` keeps only for episodes.

    With None, those of all servers. Versions without an episode under way come first; among
    equals, those that lost the traffic longest ago.
    """
    since = datetime.now(UTC) - timedelta(seconds=LONGEST_KEPT_S)
    rows = await connection.execute(_KEPT, {"policy": policy, "first": lowest_id_at(since)})
    return [
        VersionKeptForEpisodes(**{**row._mapping, "at_most_s": float(row.at_most_s)})
        for row in rows
    ]


async def unload_kept_versions(
    connection: AsyncConnection, versions: Iterable[VersionKeptForEpisodes], why: str, actor: Actor
) -> None:
    """Mark `versions` as unloaded; episodes that use one go on with the serving version."""
    # Sorted by policy, because each policy is locked: no deadlocks.
    for kept in sorted(versions, key=lambda version: version.name):
        used = ", although episodes that use it are under way" if kept.is_under_way else ""
        await mark_unloaded(connection, kept.name, [kept.version], why + used, actor)


async def unload_unused_versions(
    connection: AsyncConnection, policy: str | None, actor: Actor
) -> None:
    """Mark kept versions as unloaded that no episode under way uses (None: of all servers)."""
    kept = await versions_kept_for_episodes(connection, policy)
    unused = [version for version in kept if not version.is_under_way]
    await unload_kept_versions(connection, unused, "no episode that uses it is under way", actor)
