"""Record policy versions, and decide which one has the traffic.

After a version's row is inserted, only its state changes (`store.updates.states`), and what says
how it is judged (`store.updates.gating`).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ScalarSelect, func, insert, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.read.pages import version_of
from store.schema.recorded import OF_A_VERSION
from store.schema.trained import (
    KL_TO_BASE,
    LIVE,
    MANIFEST_SHA256,
    PROBE_TOLERANCE,
    REBUILT,
    policies,
    updates,
)
from store.tenants import DEFAULT, tenant_of
from store.updates.states import add_event, change_state, lock_policies, lock_version
from store.versions import SERVABLE, Actor, PolicyState, PolicyVersion, policy_name

# A version with what its own update has among its figures: the hash of its manifest, the update
# that was trained again for it, if one was, and how far it is from the base model; and in its
# recipe, how far from that it may be served.
WITH_HASH: Final = (
    policies,
    select(updates.c.metrics[MANIFEST_SHA256].astext)
    .where(updates.c.id == policies.c.update_id)
    .scalar_subquery()
    .label(MANIFEST_SHA256),
    select(updates.c.metrics[REBUILT]["source"].astext)
    .where(updates.c.id == policies.c.update_id)
    .scalar_subquery()
    .label(REBUILT),
    select(updates.c.metrics[KL_TO_BASE].as_float())
    .where(updates.c.id == policies.c.update_id)
    .scalar_subquery()
    .label(KL_TO_BASE),
    select(updates.c.recipe["publish"]["tolerance"].as_float())
    .where(updates.c.id == policies.c.update_id)
    .scalar_subquery()
    .label(PROBE_TOLERANCE),
)
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
    SELECT * FROM policies p
    WHERE p.name = :name AND p.state = ANY(CAST(:states AS text[])) AND p.version > 0
        AND p.files_deleted_at IS NULL AND p.changed_at < :since
        AND NOT EXISTS (SELECT FROM kept WHERE kept.version = p.version)
        AND (SELECT t.id FROM transitions t
             WHERE t.policy = p.name AND t.policy_version = p.version AND t.{OF_A_VERSION}
                 AND t.id >= :first LIMIT 1) IS NULL
    ORDER BY p.version
    """
)


async def ensure_base(
    connection: AsyncConnection, name: str, base: str | None = None, tenant: str = DEFAULT
) -> str:
    """Add the base model as version 0 of policy `name`, in state `serving`, unless it exists.

    `base` is the name that the base model is served under; None: the policy's. `tenant` is whose a
    policy is that begins now. Return the base that the policy began with.
    """
    began = await connection.scalar(
        postgresql.insert(policies)
        .values(name=name, version=0, state="serving", served_name=base or name, tenant=tenant)
        .on_conflict_do_nothing()
        .returning(policies.c.name)
    )
    if began is not None:
        why = "the policy began, with its base model"
        await add_event(connection, name, 0, "serving", reason=why, actor="trainer")
    served = select(policies.c.served_name).where(policies.c.name == name, policies.c.version == 0)
    return (await connection.execute(served)).scalar() or base or name


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


async def list_versions(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return all versions of policy `name` (None: of every policy), by name and version."""
    query = select(*WITH_HASH).order_by(policies.c.name, policies.c.version)
    if name is not None:
        query = query.where(policies.c.name == name)
    return [version_of(row) for row in await connection.execute(query)]


async def list_servable(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return the servable versions of policy `name` (None: of every policy), and its base model."""
    query = select(*WITH_HASH).where((policies.c.version == 0) | policies.c.state.in_(SERVABLE))
    if name is not None:
        query = query.where(policies.c.name == name)
    return [version_of(row) for row in await connection.execute(query)]


async def list_live(connection: AsyncConnection, name: str) -> list[PolicyVersion]:
    """Return the versions of policy `name` that are loaded, or will be, oldest first.

    There are few of these, however many versions there were.
    """
    query = select(*WITH_HASH).where(policies.c.name == name, text(LIVE))
    rows = await connection.execute(query.order_by(policies.c.version))
    return [version_of(row) for row in rows]


async def numbered_version(
    connection: AsyncConnection, name: str, version: int
) -> PolicyVersion | None:
    """Return one version of policy `name`, or None if there is none of that number."""
    query = select(*WITH_HASH).where(policies.c.name == name, policies.c.version == version)
    row = (await connection.execute(query)).first()
    return None if row is None else version_of(row)


async def add_version(
    connection: AsyncConnection,
    name: str,
    version: int,
    adapter_path: str,
    update_id: UUID,
    state: PolicyState = "written",
    *,
    imported_from: str | None = None,
) -> None:
    """Record a version whose adapter is complete on disk, in `state`.

    `imported_from` is where the adapter came from, if no update trained it. A version of a rebuild
    is `rejected` until its line is whole.
    """
    await connection.execute(
        insert(policies).values(
            name=name,
            version=version,
            state=state,
            served_name=policy_name(name, version, name),
            tenant=func.coalesce(_tenant_of_base(name), DEFAULT),
            adapter_path=adapter_path,
            update_id=update_id,
        )
    )
    why = "its update is done" if imported_from is None else f"imported from {imported_from}"
    if state == "rejected":
        why = "it is a part of a rebuild, which serves once the line is whole"
    actor: Actor = "trainer" if imported_from is None else "import"
    await add_event(connection, name, version, state, reason=why, actor=actor)


def _tenant_of_base(name: str) -> ScalarSelect[str]:
    base = policies.alias("base")
    tenant = select(base.c.tenant).where(base.c.name == name, base.c.version == 0)
    return tenant.scalar_subquery()


async def promote(
    connection: AsyncConnection,
    name: str,
    version: int,
    *,
    reason: str,
    actor: Actor,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Give `version` the traffic; the version that had it becomes `published`.

    Raises:
        UnknownPolicy: there is no such version.
        RolledBack: it was rolled back.
    """
    await lock_policies(connection, [name])
    new = await lock_version(connection, name, version)
    serving = select(policies).where(policies.c.name == name, policies.c.state == "serving")
    for row in (await connection.execute(serving)).all():
        if row.version != version:
            why = f"{name}@{version} took the traffic"
            await change_state(connection, version_of(row), "published", reason=why, actor=actor)
    await change_state(connection, new, "serving", reason=reason, actor=actor, evidence=evidence)


async def make_ready(
    connection: AsyncConnection, name: str, version: int, *, reason: str, actor: Actor
) -> None:
    """Let `version`, which is loaded, wait to go live; one that waited before never will.

    Raises:
        UnknownPolicy: there is no such version.
    """
    new = await lock_version(connection, name, version)
    ready = select(policies).where(policies.c.name == name, policies.c.state == "ready")
    for row in (await connection.execute(ready)).all():
        if row.version != version:
            why = f"{name}@{version} is newer, and waits instead"
            await change_state(connection, version_of(row), "retired", reason=why, actor=actor)
    await change_state(connection, new, "ready", reason=reason, actor=actor)


async def promote_together(
    connection: AsyncConnection, names: Sequence[str], wait_s: float
) -> list[PolicyVersion]:
    """Give the traffic to the versions of these policies that are ready, all at once, if it is due.

    It is if every policy has one, or if one of them has waited for `wait_s` seconds. Return the
    versions that were promoted. Several trainers may ask at the same time. Nothing is promoted of a
    policy that is frozen.
    """
    due, _ = await _ready_of(connection, names, wait_s)
    if not due:
        return []
    # What waits for others must not keep these from coming: it locks nothing until it is due.
    await lock_policies(connection, names)
    ready, why = await _ready_of(connection, names, wait_s, held=True)
    for version in ready:
        await promote(connection, version.name, version.version, reason=why, actor="trainer")
    return ready


async def _ready_of(
    connection: AsyncConnection, names: Sequence[str], wait_s: float, *, held: bool = False
) -> tuple[list[PolicyVersion], str]:
    """Return the versions that are ready, if it is time to promote them, and why it is.

    If `held`, they stay so until the transaction ends.
    """
    has_waited = text("changed_at < now() - make_interval(secs => :wait_s) AS has_waited")
    base = policies.alias("base")
    frozen = select(base.c.name).where(base.c.version == 0, base.c.frozen_at.is_not(None))
    query = (
        select(policies, has_waited.bindparams(wait_s=wait_s))
        .where(policies.c.name.in_(names), policies.c.state == "ready")
        .where(policies.c.name.not_in(frozen))
        .order_by(policies.c.name, policies.c.version)
    )
    ready = (await connection.execute(query.with_for_update() if held else query)).all()
    if {row.name for row in ready} == set(names):
        return [version_of(row) for row in ready], "it is ready"
    if not any(row.has_waited for row in ready):
        return [], ""
    why = f"it has waited for {wait_s:g} s for others to go live with"
    return [version_of(row) for row in ready], why


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


async def pinned_episodes(connection: AsyncConnection, most: int) -> list[tuple[str, str, int]]:
    """Return (policy, episode key, version) of the last day's resumable episodes, newest first.

    The version is the one that an episode goes on with: one that had to leave its first has moved
    to a newer one. An episode that became a part of another goes on with that episode's. At most
    `most`.
    """
    rows = await connection.execute(
        text(
            "SELECT p.policy, e.key, p.latest"
            " FROM episodes e JOIN episode_policies p ON p.episode_id = COALESCE(e.root, e.id)"
            " WHERE (e.method <> 'own' OR e.linked)"
            " AND e.last_call_at > now() - interval '1 day'"
            " ORDER BY e.last_call_at DESC LIMIT :most"
        ),
        {"most": most},
    )
    return [(row.policy, row.key, row.latest) for row in rows]


async def pinned_version(connection: AsyncConnection, policy: str, episode: str) -> int | None:
    """Return the version of `policy` that an episode goes on with.

    None: it has no call of that policy yet.
    """
    version = await connection.scalar(
        text(
            "SELECT p.latest FROM episodes e JOIN episode_policies p"
            " ON p.episode_id = COALESCE(e.root, e.id)"
            " WHERE e.key = :key AND p.policy = :policy"
        ),
        {"key": episode, "policy": policy},
    )
    return None if version is None else int(version)
