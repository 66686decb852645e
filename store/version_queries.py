"""Read policy versions: their lineage, numbers and states, idle ones, and the events of a policy.

Queries that run every second read by index the versions that are live or have files; these are few,
however many versions there ever were.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.records import Record
from store.schema.tables import (
    CALLED_BACK,
    FREE,
    KL_TO_BASE,
    LIVE,
    MANIFEST_SHA256,
    OF_A_VERSION,
    ONCE_SERVED,
    PROBE_TOLERANCE,
    THROUGHPUT,
    WITHOUT_LOGPROBS,
    policies,
    policy_events,
    updates,
)
from store.tenants import tenant_of
from store.versions import (
    SERVABLE,
    UNSERVED,
    VERSION_COLUMNS,
    PolicyEvent,
    PolicyState,
    PolicyVersion,
    version_of,
)

# Lineage: an update makes a version from its parent. Nothing that was trained on from a failed
# version may serve: it may have learned what that one was rolled back for. An import has version 0
# as its parent.

# The versions `of` a condition with all their descendants, as the table `built`.
DESCENDANTS: Final = """
    WITH RECURSIVE built AS (
        SELECT version FROM policies p WHERE name = :name AND {of}
        UNION
        SELECT u.version FROM updates u JOIN built ON u.parent_version = built.version
        WHERE u.policy = :name AND u.version IS NOT NULL)
"""
# A version that failed: it was rolled back, ended by a retraining, or rejected by its replay. One
# that made way for a newer one did not fail.
_FAILED: Final = """
    (p.rolled_back_at IS NOT NULL OR p.ended_at IS NOT NULL
        OR p.state = 'rejected' AND EXISTS (
        SELECT FROM policy_events v WHERE v.name = p.name AND v.version = p.version
            AND v.to_state = 'rejected' AND jsonb_exists(v.evidence, 'replay')))
"""
# A version and what it was trained on from, back to the first that a server has loaded: a candidate
# of several updates consists of these.
_CHAIN: Final = """
    WITH RECURSIVE chain AS (
        SELECT version, parent_version FROM updates WHERE policy = :name AND version = :version
        UNION
        SELECT u.version, u.parent_version FROM chain
            JOIN policies p ON p.name = :name AND p.version = chain.parent_version
            JOIN updates u ON u.id = p.update_id
        WHERE p.state = 'written')
"""
_DESCENDANTS_OF: Final = text(
    f"""
    {DESCENDANTS.format(of="version = :version")}
    SELECT {VERSION_COLUMNS} FROM policies p JOIN built USING (version)
    WHERE p.name = :name AND p.version <> :version AND p.state = ANY(CAST(:states AS text[]))
    ORDER BY p.version FOR NO KEY UPDATE OF p
    """
)
_HEAD: Final = text(
    f"""
    {DESCENDANTS.format(of=_FAILED)}
    SELECT {VERSION_COLUMNS} FROM policies p
    WHERE p.name = :name AND p.version NOT IN (SELECT version FROM built)
        AND (p.version = 0 OR p.state IN ('written', 'ready', 'candidate', 'canary', 'serving'))
    ORDER BY p.version DESC LIMIT 1
    """
)
_FAILED_ANCESTOR: Final = text(
    f"""
    WITH RECURSIVE chain AS (
        SELECT CAST(:version AS integer) AS version
        UNION
        SELECT u.parent_version FROM chain JOIN updates u
            ON u.policy = :name AND u.version = chain.version)
    SELECT {VERSION_COLUMNS} FROM policies p JOIN chain USING (version)
    WHERE p.name = :name AND {_FAILED} ORDER BY version LIMIT 1
    """
)
_UNLOADED_ANCESTORS: Final = text(
    f"""
    {_CHAIN}
    SELECT {VERSION_COLUMNS}, (SELECT CAST(u.metrics ->> '{KL_TO_BASE}' AS float) FROM updates u
        WHERE u.id = p.update_id) AS {KL_TO_BASE}
    FROM policies p JOIN chain USING (version)
    WHERE p.name = :name AND p.version < :version ORDER BY p.version DESC
    """
)
_UPDATES_SINCE_LOADED: Final = text(f"{_CHAIN} SELECT count(*) FROM chain")
# A version has several children only if all but the last of them failed.
_REJECTED_SIBLINGS: Final = text(
    """
    SELECT count(*) FROM updates own
    JOIN updates u ON u.policy = own.policy AND u.parent_version = own.parent_version
    JOIN policies p ON p.update_id = u.id
    WHERE own.policy = :name AND own.version = :version AND p.version < own.version
        AND p.state = 'rejected'
    """
)


async def head_of(connection: AsyncConnection, name: str) -> PolicyVersion:
    """Return the version that a gated policy is trained on from.

    It is the newest that serves, or may still, and has no failed ancestor. If no trained one is
    left, it is version 0.
    """
    return version_of((await connection.execute(_HEAD, {"name": name})).one())


async def lock_descendants(
    connection: AsyncConnection, version: PolicyVersion, states: Sequence[PolicyState]
) -> list[PolicyVersion]:
    """Return the descendants of a version in these states, oldest first, locked."""
    values = {"name": version.name, "version": version.version, "states": list(states)}
    return [version_of(row) for row in await connection.execute(_DESCENDANTS_OF, values)]


async def failed_ancestor(
    connection: AsyncConnection, name: str, version: int
) -> PolicyVersion | None:
    """Return the oldest that failed of a version and its ancestors, or None if none did."""
    values = {"name": name, "version": version}
    row = (await connection.execute(_FAILED_ANCESTOR, values)).first()
    return None if row is None else version_of(row)


async def unloaded_ancestors(
    connection: AsyncConnection, name: str, version: int
) -> list[PolicyVersion]:
    """Return the ancestors of a version that no server has loaded yet, newest first.

    The chain ends at the first ancestor that was loaded.
    """
    rows = await connection.execute(_UNLOADED_ANCESTORS, {"name": name, "version": version})
    return [version_of(row) for row in rows]


async def updates_since_candidate(connection: AsyncConnection, name: str, version: int) -> int:
    """Return how many updates lie between a version and its newest ancestor that was loaded.

    Its own is among them.
    """
    values = {"name": name, "version": version}
    return int(await connection.scalar(_UPDATES_SINCE_LOADED, values) or 0)


async def rejected_siblings(connection: AsyncConnection, name: str, version: int) -> int:
    """Return how many older versions of the same parent were rejected."""
    values = {"name": name, "version": version}
    return int(await connection.scalar(_REJECTED_SIBLINGS, values) or 0)


# By number and state, idle ones, those with files, those to go back to


def _of_own_update(label: str, value: ColumnElement[Any]) -> Any:
    query = select(value).where(updates.c.id == policies.c.update_id)
    return query.scalar_subquery().label(label)


# A version with the hash of its manifest, its KL to the base model, and how fast it was trained
# (figures of its own update), and the probe's tolerance (in that update's recipe).
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
    _of_own_update(PROBE_TOLERANCE, updates.c.recipe["publish"]["tolerance"].as_float()),
).order_by(policies.c.name, policies.c.version)
_SINCE: Final = text("SELECT GREATEST(now() - make_interval(secs => :idle_s), to_timestamp(0))")
# What comes before the separator in a key, with it (`store.tenants`); empty for the default tenant.
_TENANTS_OF_CALLS: Final = text(
    """
    SELECT DISTINCT substr(e.key, 1, strpos(e.key, chr(31))) AS tenant
    FROM episode_policies p JOIN episodes e ON e.id = p.episode_id
    WHERE p.policy = :name AND e.deleted_at IS NULL
    """
)
# In use is what episodes of that time go on with, whichever policy they called, which is found once
# for all; and what served a call of that time, whoever asked for it. The latter is looked for by
# index, in the partitions of the days in question. LIMIT keeps PostgreSQL from reading all calls of
# the time for all versions at once.
_IDLE: Final = text(
    f"""
    WITH kept AS MATERIALIZED (
        SELECT DISTINCT s.latest AS version
        FROM episodes e JOIN episode_policies s
            ON s.episode_id = COALESCE(e.root, e.id) AND s.policy = :name
        WHERE e.last_call_at > :since)
    SELECT {VERSION_COLUMNS} FROM policies p
    WHERE p.name = :name AND p.state = ANY(CAST(:states AS text[])) AND p.version > 0
        AND p.files_deleted_at IS NULL AND p.changed_at < :since
        AND NOT EXISTS (SELECT FROM kept WHERE kept.version = p.version)
        AND (SELECT t.id FROM transitions t
             WHERE t.policy = p.name AND t.policy_version = p.version AND t.{OF_A_VERSION}
                 AND t.id >= :first LIMIT 1) IS NULL
    ORDER BY p.version
    """
)
# The one that had the traffic before it, as far as that can be loaded again; or the base model.
# That is told by times: an operator may have given it back to an older one in between. The base
# model's beginning has no time. What was trained on from one that was rolled back may have what
# that was rolled back for, and an ended one is in doubt.
_BEFORE: Final = text(
    f"""
    {DESCENDANTS.format(of="(rolled_back_at IS NOT NULL OR ended_at IS NOT NULL)")}
    SELECT version FROM policies
    WHERE name = :name AND version < :version AND version NOT IN (SELECT version FROM built)
        AND (version = 0 OR {ONCE_SERVED} OR state = 'retired' AND files_deleted_at IS NULL
            AND EXISTS (SELECT FROM policy_events v WHERE v.name = policies.name
                AND v.version = policies.version AND v.to_state = 'serving'))
    ORDER BY (
        SELECT max(v.at) FROM policy_events v
        WHERE v.name = policies.name AND v.version = policies.version AND v.to_state = 'serving'
            AND v.from_state IS NOT NULL AND v.at <= COALESCE((
                SELECT max(o.at) FROM policy_events o
                WHERE o.name = :name AND o.version = :version AND o.to_state = 'serving'),
                'infinity')
        ) DESC NULLS LAST, version DESC LIMIT 1
    """
)
_CALLED_BACK: Final = text(
    f"SELECT {CALLED_BACK} FROM policies p WHERE name = :name AND version = :version"
)
# Versions with a call in a free episode that an update would ask for log-probabilities again
# (docs/decisions/042-without-log-probabilities.md), from an index of such calls alone: what waits
# may be a hundred thousand episodes.
_WAITED_FOR: Final = text(
    f"""
    SELECT asked.version FROM unnest(CAST(:versions AS integer[])) AS asked (version)
    WHERE EXISTS (
        SELECT FROM transitions t JOIN episodes e ON e.id = t.episode_id
        JOIN episode_policies w ON w.episode_id = COALESCE(e.root, e.id) AND w.policy = :policy
        WHERE t.policy = :policy AND t.policy_version = asked.version
            AND {WITHOUT_LOGPROBS} AND {FREE})
    """
)
# What the traffic may go back to: each version counts once, in the order in which versions last got
# the traffic, whether its files are there or not.
_ONCE_SERVED: Final = text(
    f"""
    {DESCENDANTS.format(of="(rolled_back_at IS NOT NULL OR ended_at IS NOT NULL)")},
    served AS (
        SELECT version, rank() OVER (ORDER BY max(at) DESC, version DESC) AS place
        FROM policy_events WHERE name = :name AND to_state = 'serving' AND version > 0
        GROUP BY version)
    SELECT version, place FROM policies JOIN served USING (version)
    WHERE name = :name AND state IN ('published', 'retired') AND rolled_back_at IS NULL
        AND files_deleted_at IS NULL AND version NOT IN (SELECT version FROM built)
    ORDER BY place
    """
)
_SERVING: Final = text(
    f"SELECT {VERSION_COLUMNS} FROM policies p"
    " WHERE name = :name AND state = 'serving' AND version > 0"
)
_RUNNING: Final = text(
    "SELECT EXISTS (SELECT FROM updates WHERE policy = :policy AND state = 'running')"
)


class OnceServed(Record, frozen=True, kw_only=True):
    """Describe a version that had the traffic, and may get it back.

    `place` is its place among all that had it, by when they last got it: the one that serves has 1,
    unless that is the base model.
    """

    version: int
    place: int


class RollbackTargets(Record, frozen=True, kw_only=True):
    """Hold the versions that a roll-back may give the traffic to, of those whose files are there.

    `before` would serve if the serving version were rolled back (0: the base model). `served` are
    all that had the traffic and did not fail, the last first.
    """

    before: int
    served: Sequence[OnceServed]


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
    """Return all versions of policy `name` (None: of every policy), by name and version."""
    return await _versions(connection, name)


async def list_servable(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return the servable versions of policy `name` (None: of every policy), and its base model."""
    return await _versions(
        connection, name, (policies.c.version == 0) | policies.c.state.in_(SERVABLE)
    )


async def list_live(connection: AsyncConnection, name: str) -> list[PolicyVersion]:
    """Return the versions of policy `name` that are loaded, or will be, oldest first."""
    return await _versions(connection, name, text(LIVE))


async def versions_with_files(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return the versions of policy `name` (None: of every policy) whose files were not deleted.

    They are in the order of name and version, the base model's among them.
    """
    return await _versions(connection, name, policies.c.files_deleted_at.is_(None))


async def numbered_version(
    connection: AsyncConnection, name: str, version: int
) -> PolicyVersion | None:
    """Return one version of policy `name`, or None if there is none of that number."""
    return next(iter(await _versions(connection, name, policies.c.version == version)), None)


async def owners_of(connection: AsyncConnection, name: str) -> set[str]:
    """Return the tenants whose policy `name` is, or whose episodes have calls of it.

    Of a policy that has begun this is the one that it began with.
    """
    began = select(policies.c.tenant).where(policies.c.name == name, policies.c.version == 0)
    tenant = await connection.scalar(began)
    if tenant is not None:
        return {tenant}
    rows = await connection.execute(_TENANTS_OF_CALLS, {"name": name})
    return {tenant_of(row.tenant) for row in rows}


async def idle_versions(
    connection: AsyncConnection, name: str, states: Sequence[PolicyState], idle_s: float
) -> list[PolicyVersion]:
    """Return trained versions in `states` that are idle, oldest first.

    For `idle_s` seconds their state did not change, they served no call, by whatever name it asked
    for them, and no episode that goes on with them made one. Version 0, the base model, is never
    among them, nor are versions whose files were deleted.
    """
    since: datetime = (await connection.execute(_SINCE, {"idle_s": idle_s})).scalar_one()
    values = {"name": name, "states": list(states), "since": since, "first": lowest_id_at(since)}
    return [version_of(row) for row in await connection.execute(_IDLE, values)]


async def version_before(connection: AsyncConnection, version: PolicyVersion) -> PolicyVersion:
    """Return what would serve if `version` lost the traffic: what had it before, or the base model.

    A `retired` one is on no server, and must be loaded before it can serve.
    """
    values = {"name": version.name, "version": version.version}
    number = (await connection.execute(_BEFORE, values)).scalar_one()
    before = await numbered_version(connection, version.name, number)
    assert before is not None
    return before


async def was_called_back(connection: AsyncConnection, version: PolicyVersion) -> bool:
    """Return whether a version is servable again to serve, and no server may have it loaded yet.

    It had been retired, and whoever called it back may have been killed since.
    """
    values = {"name": version.name, "version": version.version}
    return bool(await connection.scalar(_CALLED_BACK, values))


async def rollback_targets(connection: AsyncConnection, name: str) -> RollbackTargets:
    """Return what a roll-back of the policy may give the traffic to."""
    values = {"name": name}
    serving = (await connection.execute(_SERVING, values)).first()
    before = 0
    if serving is not None:
        before = (await version_before(connection, version_of(serving))).version
    rows = await connection.execute(_ONCE_SERVED, values)
    served = [OnceServed(version=row.version, place=row.place) for row in rows]
    return RollbackTargets(before=before, served=served)


async def deleted_versions(
    connection: AsyncConnection, name: str, numbers: Collection[int]
) -> set[int]:
    """Return those of the versions `numbers` whose files were deleted."""
    query = select(policies.c.version).where(
        policies.c.name == name,
        policies.c.version.in_(numbers),
        policies.c.files_deleted_at.is_not(None),
    )
    return set((await connection.execute(query)).scalars())


async def unasked_versions(
    connection: AsyncConnection, name: str, keep: Collection[int], idle_s: float
) -> list[PolicyVersion]:
    """Return the versions of a policy whose files are there and no reader is left for.

    They are retired or rejected and not in `keep`; they had no change of state and no call for
    `idle_s` seconds; and no free episode waits for their log-probabilities. There are none while
    an update of the policy is running.
    """
    if await connection.scalar(_RUNNING, {"policy": name}):
        return []
    idle = await idle_versions(connection, name, UNSERVED, idle_s)
    unasked = {version.version: version for version in idle if version.version not in keep}
    if not unasked:
        return []
    values = {"policy": name, "versions": list(unasked)}
    waited_for = set((await connection.execute(_WAITED_FOR, values)).scalars())
    return [version for number, version in unasked.items() if number not in waited_for]


async def mark_deleted(
    connection: AsyncConnection, name: str, numbers: Collection[int]
) -> set[int]:
    """Mark the files of these versions as deleted; return those that could be marked.

    A version that was given another state meanwhile keeps its files.
    """
    marked = await connection.execute(
        update(policies)
        .where(
            policies.c.name == name,
            policies.c.version.in_(numbers),
            policies.c.state.in_(UNSERVED),
        )
        .values(files_deleted_at=text("now()"))
        .returning(policies.c.version)
    )
    return set(marked.scalars())


# How their states changed, and why


async def list_events(
    connection: AsyncConnection,
    name: str,
    version: int | None = None,
    *,
    most: int = 100,
    before: UUID | None = None,
) -> list[PolicyEvent]:
    """Return changes of state of policy `name`, the newest first.

    `version` limits them to one version's. There are at most `most`; `before` is the id of the
    event that they come before, to go on from there.
    """
    query = select(policy_events).where(policy_events.c.name == name)
    if version is not None:
        query = query.where(policy_events.c.version == version)
    if before is not None:
        query = query.where(policy_events.c.id < before)
    rows = await connection.execute(query.order_by(policy_events.c.id.desc()).limit(most))
    return [PolicyEvent(**row._mapping) for row in rows]


async def is_why_it_stays(
    connection: AsyncConnection, name: str, version: int, reason: str
) -> bool:
    """Return whether an event of a version says with this reason why it stayed in its state."""
    query = select(policy_events.c.id).where(
        policy_events.c.name == name,
        policy_events.c.version == version,
        policy_events.c.from_state == policy_events.c.to_state,
        policy_events.c.reason == reason,
    )
    return (await connection.execute(query.limit(1))).first() is not None


async def why_stays(connection: AsyncConnection, name: str, version: int) -> str | None:
    """Return why a version stays in its state, if its newest event is about that; else None."""
    newest = await list_events(connection, name, version, most=1)
    return next((one.reason for one in newest if one.from_state == one.to_state), None)
