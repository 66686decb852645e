"""Read policy versions: by number, state and lineage, idle ones, and the events of a policy.

Queries that run every second use indexes of the versions that are live or have files: these are
few, however many versions there ever were.
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.schema.tables import (
    FREE,
    KL_TO_BASE,
    LIVE,
    MANIFEST_SHA256,
    OF_A_VERSION,
    PROMOTED_WHEN_LOADED,
    ROLLBACK_TARGET,
    SERVABLE,
    THROUGHPUT,
    WITHOUT_LOGPROBS,
    policies,
    policy_events,
    updates,
)
from store.tenants import tenant_of
from store.versions import VERSION_COLUMNS, PolicyEvent, PolicyState, PolicyVersion, version_of


def _of_own_update(label: str, value: ColumnElement[Any]) -> Any:
    query = select(value).where(updates.c.id == policies.c.update_id)
    return query.scalar_subquery().label(label)


# A version with the hash of its manifest, its KL to the base model, and how fast it was trained
# (figures of its own update).
_VERSIONS: Final = select(
    policies,
    _of_own_update(MANIFEST_SHA256, updates.c.metrics[MANIFEST_SHA256].astext),
    _of_own_update(KL_TO_BASE, updates.c.metrics[KL_TO_BASE].as_float()),
    _of_own_update(
        "throughput",
        func.jsonb_strip_nulls(
            func.jsonb_build_object(*(v for n in THROUGHPUT for v in (n, updates.c.metrics[n]))),
            type_=updates.c.metrics.type,
        ),
    ),
).order_by(policies.c.name, policies.c.version)
_SINCE: Final = text("SELECT GREATEST(now() - make_interval(secs => :idle_s), to_timestamp(0))")
# The part of a key up to and with the separator (`store.tenants`); empty for the default tenant.
_TENANTS_OF_CALLS: Final = text(
    """
    SELECT DISTINCT substr(e.key, 1, strpos(e.key, chr(31))) AS tenant
    FROM episode_policies p JOIN episodes e ON e.id = p.episode_id
    WHERE p.policy = :name AND e.deleted_at IS NULL
    """
)
# The condition for a version that no server should have.
_UNSERVED: Final = "(state = 'rejected' OR unloaded_at IS NOT NULL)"
# A version is in use if an episode that goes on with it had a call since then, of any policy (read
# once for all versions), or if it served a call since then, even one that named the version. Such
# calls are looked up by index in the partitions of those days. LIMIT keeps PostgreSQL from reading
# all calls since then for all versions at once.
_UNSERVED_VERSIONS: Final = text(
    f"""
    WITH kept AS MATERIALIZED (
        SELECT DISTINCT s.latest AS version
        FROM episodes e JOIN episode_policies s
            ON s.episode_id = COALESCE(e.root, e.id) AND s.policy = :name
        WHERE e.last_call_at > :since)
    SELECT {VERSION_COLUMNS} FROM policies p
    WHERE p.name = :name AND {_UNSERVED} AND p.version > 0
        AND p.files_deleted_at IS NULL AND p.changed_at < :since
        AND NOT EXISTS (SELECT FROM kept WHERE kept.version = p.version)
        AND (SELECT t.id FROM transitions t
             WHERE t.policy = p.name AND t.policy_version = p.version AND t.{OF_A_VERSION}
                 AND t.id >= :first LIMIT 1) IS NULL
    ORDER BY p.version
    """
)
_TO_TRAIN_FROM: Final = text(
    f"""
    SELECT {VERSION_COLUMNS} FROM policies p
    WHERE name = :name AND {LIVE}
        AND (version = 0 OR state IN ('written', 'loaded', 'canary', 'serving'))
    ORDER BY version DESC LIMIT 1
    """
)
# Versions that an update would need to compute the log-probabilities of a call in a free episode
# (docs/decisions/042-without-log-probabilities.md), from an index of such calls alone: a hundred
# thousand episodes may wait.
_NEEDED_FOR_LOGPROBS: Final = text(
    f"""
    SELECT asked.version FROM unnest(CAST(:versions AS integer[])) AS asked (version)
    WHERE EXISTS (
        SELECT FROM transitions t JOIN episodes e ON e.id = t.episode_id
        JOIN episode_policies w ON w.episode_id = COALESCE(e.root, e.id) AND w.policy = :policy
        WHERE t.policy = :policy AND t.policy_version = asked.version
            AND {WITHOUT_LOGPROBS} AND {FREE})
    """
)
# The retired versions whose files stay, so that a person can promote them again: the last to serve,
# the oldest of the two before it, the oldest of the four before those, and so on. So they get fewer
# with age: the next is at most about three times as far back, and of 10,000 versions 14 stay.
_KEPT_TO_PROMOTE: Final = text(
    """
    WITH served AS (
        SELECT version, floor(log(2, rank() OVER (ORDER BY max(at) DESC, version DESC))) AS span
        FROM policy_events e JOIN policies p USING (name, version)
        WHERE name = :name AND to_state = 'serving' AND version > 0 AND p.state <> 'serving'
        GROUP BY version)
    SELECT DISTINCT ON (span) version FROM policies JOIN served USING (version)
    WHERE name = :name AND state = 'retired' AND ended_at IS NULL AND files_deleted_at IS NULL
    ORDER BY span, version
    """
)
_TO_PROMOTE: Final = text(
    f"""
    SELECT DISTINCT COALESCE(gate->'publish_with', jsonb_build_array(name)) AS names
    FROM policies WHERE {LIVE} AND state = 'loaded' AND {PROMOTED_WHEN_LOADED}
    """
)
_ROLLBACK_TARGET: Final = text(f"SELECT {ROLLBACK_TARGET.format(name=':name')}")
_RUNNING: Final = text(
    "SELECT EXISTS (SELECT FROM updates WHERE policy = :policy AND state = 'running')"
)


async def _versions(
    connection: AsyncConnection, name: str | None, *conditions: Any
) -> list[PolicyVersion]:
    """Return the versions of policy `name` (None: of every policy) that meet the conditions."""
    query = _VERSIONS.where(*conditions)
    if name is not None:
        query = query.where(policies.c.name == name)
    return [version_of(row) for row in await connection.execute(query)]


async def list_versions(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return all versions of policy `name` (None: of every policy), ordered by name and version."""
    return await _versions(connection, name)


async def list_servable(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return the versions of policy `name` (None: of every policy) that servers should have.

    The base model is always among them.
    """
    return await _versions(connection, name, text(SERVABLE))


async def list_live(connection: AsyncConnection, name: str) -> list[PolicyVersion]:
    """Return the versions of policy `name` that servers have loaded or will load, oldest first."""
    return await _versions(connection, name, text(LIVE))


async def versions_in_states(
    connection: AsyncConnection, name: str, *states: PolicyState
) -> list[PolicyVersion]:
    """Return the versions of a policy in these states, oldest first."""
    return await _versions(connection, name, policies.c.state.in_(states))


async def newest_written(connection: AsyncConnection) -> list[tuple[PolicyVersion, str]]:
    """Return each policy's newest version in state `written`, with its base model's served name."""
    written = await _versions(connection, None, text(LIVE), policies.c.state == "written")
    newest = {version.name: version for version in written}
    query = select(policies.c.name, policies.c.served_name).where(
        policies.c.name.in_(list(newest)), policies.c.version == 0
    )
    rows = await connection.execute(query) if newest else ()
    return [(newest[row.name], row.served_name) for row in rows]


async def groups_to_promote(connection: AsyncConnection) -> list[list[str]]:
    """Return the policies with loaded versions that need no decision, as groups that go live."""
    return [row.names for row in await connection.execute(_TO_PROMOTE)]


async def versions_with_files(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return the versions of policy `name` (None: of every policy) whose files were not deleted.

    They are ordered by name and version, and include the base model, version 0.
    """
    return await _versions(connection, name, policies.c.files_deleted_at.is_(None))


async def numbered_version(
    connection: AsyncConnection, name: str, version: int
) -> PolicyVersion | None:
    return next(iter(await _versions(connection, name, policies.c.version == version)), None)


async def tenants_of_policy(connection: AsyncConnection, name: str) -> set[str]:
    """Return the tenant of policy `name`, or the tenants of its calls before it has a version."""
    began = select(policies.c.tenant).where(policies.c.name == name, policies.c.version == 0)
    tenant = await connection.scalar(began)
    if tenant is not None:
        return {tenant}
    rows = await connection.execute(_TENANTS_OF_CALLS, {"name": name})
    return {tenant_of(row.tenant) for row in rows}


async def version_to_train_from(connection: AsyncConnection, name: str) -> PolicyVersion:
    """Return the version that the next update starts from: the newest that may still serve.

    Rejected, retired, rolled-back and ended versions are passed over; version 0 never is.
    """
    return version_of((await connection.execute(_TO_TRAIN_FROM, {"name": name})).one())


async def rollback_target(connection: AsyncConnection, name: str) -> PolicyVersion:
    """Return the version that a roll-back would return to: the control, or the last that served.

    Versions that were unloaded, rolled back or ended are passed over. It is the base model if no
    other version is left, or if the base model serves.
    """
    number = await connection.scalar(_ROLLBACK_TARGET, {"name": name})
    target = await numbered_version(connection, name, number or 0)
    assert target is not None
    return target


async def idle_versions(
    connection: AsyncConnection, name: str, idle_s: float
) -> list[PolicyVersion]:
    """Return the rejected and unloaded versions that have files and are idle, oldest first.

    No server should have them. For `idle_s` seconds their state has not changed, they have served
    no call, not even one that named the version, and no episode that goes on with them has made a
    call.
    """
    since: datetime = (await connection.execute(_SINCE, {"idle_s": idle_s})).scalar_one()
    values = {"name": name, "since": since, "first": lowest_id_at(since)}
    rows = await connection.execute(_UNSERVED_VERSIONS, values)
    return [version_of(row) for row in rows]


async def deleted_versions(
    connection: AsyncConnection, name: str, numbers: Collection[int]
) -> set[int]:
    """Return those of the versions `numbers` whose files are marked as deleted."""
    query = select(policies.c.version).where(
        policies.c.name == name,
        policies.c.version.in_(numbers),
        policies.c.files_deleted_at.is_not(None),
    )
    return set((await connection.execute(query)).scalars())


async def versions_with_unneeded_files(
    connection: AsyncConnection, name: str, idle_s: float
) -> list[PolicyVersion]:
    """Return the versions of a policy whose files nothing needs any more.

    They are those of `idle_versions` that are not kept for a person to promote again, and that no
    free episode needs for computing log-probabilities. While an update of the policy runs, return
    none.
    """
    if await connection.scalar(_RUNNING, {"policy": name}):
        return []
    unserved = await idle_versions(connection, name, idle_s)
    values = {"policy": name, "versions": [one.version for one in unserved]}
    needed = set((await connection.execute(_NEEDED_FOR_LOGPROBS, values)).scalars())
    kept_to_promote = set((await connection.execute(_KEPT_TO_PROMOTE, {"name": name})).scalars())
    return [one for one in unserved if one.version not in needed | kept_to_promote]


async def mark_files_deleted(
    connection: AsyncConnection, name: str, numbers: Collection[int]
) -> set[int]:
    """Mark the files of these versions as deleted; return those that could be marked.

    A version that was recalled meanwhile keeps its files.
    """
    marked = await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.version.in_(numbers), text(_UNSERVED))
        .values(files_deleted_at=text("now()"))
        .returning(policies.c.version)
    )
    return set(marked.scalars())


# Events


async def list_events(
    connection: AsyncConnection,
    name: str | None,
    version: int | None = None,
    *,
    most: int = 100,
) -> list[PolicyEvent]:
    """Return at most `most` events of policy `name` (None: of every policy), the newest first.

    With `version`, only events of this version are returned.
    """
    query = select(policy_events)
    if name is not None:
        query = query.where(policy_events.c.name == name)
    if version is not None:
        query = query.where(policy_events.c.version == version)
    rows = await connection.execute(query.order_by(policy_events.c.id.desc()).limit(most))
    return [PolicyEvent(**row._mapping) for row in rows]


async def why_held(connection: AsyncConnection, name: str) -> str | None:
    """Return why no update starts from the serving version, or None if updates do."""
    held = policies.c.frozen_at.is_not(None) & (policies.c.version > 0)
    versions = await _versions(connection, name, policies.c.state == "serving", held)
    reasons = [await why_state_stayed(connection, name, one.version) for one in versions]
    return next((reason or "rewards fell" for reason in reasons), None)


async def why_state_stayed(connection: AsyncConnection, name: str, version: int) -> str | None:
    """Return the reason of a version's newest event if it kept the version's state, else None."""
    newest = await list_events(connection, name, version, most=1)
    return next((one.reason for one in newest if one.from_state == one.to_state), None)
