"""Record policy versions, and decide which one has the traffic.

After a version's row is inserted, only its state (and the time of its change) changes.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import insert, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import UnknownPolicy
from store.ids import lowest_id_at
from store.read.pages import version_of
from store.records import SERVABLE, PolicyState, PolicyVersion, policy_name
from store.schema.recorded import OF_A_VERSION
from store.schema.trained import LIVE, policies

_SINCE: Final = text("SELECT GREATEST(now() - make_interval(secs => :idle_s), to_timestamp(0))")
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


async def ensure_base(connection: AsyncConnection, name: str, base: str | None = None) -> str:
    """Add the base model as version 0 of policy `name`, in state `serving`, unless it exists.

    `base` is the name that the base model is served under; None: the policy's. Return that which
    the policy began with.
    """
    await connection.execute(
        postgresql.insert(policies)
        .values(name=name, version=0, state="serving", served_name=base or name)
        .on_conflict_do_nothing()
    )
    served = select(policies.c.served_name).where(policies.c.name == name, policies.c.version == 0)
    return (await connection.execute(served)).scalar() or base or name


async def list_versions(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return all versions of policy `name` (None: of every policy), by name and version."""
    query = select(policies).order_by(policies.c.name, policies.c.version)
    if name is not None:
        query = query.where(policies.c.name == name)
    return [version_of(row) for row in await connection.execute(query)]


async def list_servable(
    connection: AsyncConnection, name: str | None = None
) -> list[PolicyVersion]:
    """Return the servable versions of policy `name` (None: of every policy), and its base model."""
    query = select(policies).where((policies.c.version == 0) | policies.c.state.in_(SERVABLE))
    if name is not None:
        query = query.where(policies.c.name == name)
    return [version_of(row) for row in await connection.execute(query)]


async def list_live(connection: AsyncConnection, name: str) -> list[PolicyVersion]:
    """Return the versions of policy `name` that are loaded, or will be, oldest first.

    There are few of these, however many versions there were.
    """
    query = select(policies).where(policies.c.name == name, text(LIVE))
    rows = await connection.execute(query.order_by(policies.c.version))
    return [version_of(row) for row in rows]


async def numbered_version(
    connection: AsyncConnection, name: str, version: int
) -> PolicyVersion | None:
    """Return one version of policy `name`, or None if there is none of that number."""
    query = select(policies).where(policies.c.name == name, policies.c.version == version)
    row = (await connection.execute(query)).first()
    return None if row is None else version_of(row)


async def add_version(
    connection: AsyncConnection, name: str, version: int, adapter_path: str, update_id: UUID
) -> None:
    """Record a version whose adapter is complete on disk, in state `written`."""
    await connection.execute(
        insert(policies).values(
            name=name,
            version=version,
            state="written",
            served_name=policy_name(name, version, name),
            adapter_path=adapter_path,
            update_id=update_id,
        )
    )


async def set_state(
    connection: AsyncConnection, name: str, version: int, state: PolicyState
) -> None:
    """Move one version to `state`.

    Raises:
        UnknownPolicy: there is no such version.
    """
    changed = await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.version == version)
        .values(state=state, changed_at=text("now()"))
        .returning(policies.c.version)
    )
    if changed.first() is None:
        raise UnknownPolicy(f"policy {name!r} has no version {version}")


async def promote(connection: AsyncConnection, name: str, version: int) -> None:
    """Give `version` the traffic; the version that had it becomes `published`.

    Raises:
        UnknownPolicy: there is no such version.
    """
    await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.state == "serving")
        .values(state="published", changed_at=text("now()"))
    )
    await set_state(connection, name, version, "serving")


async def make_ready(connection: AsyncConnection, name: str, version: int) -> None:
    """Let `version`, which is loaded, wait to go live; one that waited before never will.

    Raises:
        UnknownPolicy: there is no such version.
    """
    await connection.execute(
        update(policies)
        .where(policies.c.name == name, policies.c.state == "ready")
        .values(state="retired", changed_at=text("now()"))
    )
    await set_state(connection, name, version, "ready")


async def promote_together(
    connection: AsyncConnection, names: Sequence[str], wait_s: float
) -> list[PolicyVersion]:
    """Give the traffic to the versions of these policies that are ready, all at once, if it is due.

    It is if every policy has one, or if one of them has waited for `wait_s` seconds. Return the
    versions that were promoted. Several trainers may ask at the same time.
    """
    has_waited = text("changed_at < now() - make_interval(secs => :wait_s) AS has_waited")
    rows = await connection.execute(
        select(policies, has_waited.bindparams(wait_s=wait_s))
        .where(policies.c.name.in_(names), policies.c.state == "ready")
        .order_by(policies.c.name, policies.c.version)
        .with_for_update()
    )
    ready = rows.all()
    if {row.name for row in ready} < set(names) and not any(row.has_waited for row in ready):
        return []
    for row in ready:
        await promote(connection, row.name, row.version)
    return [version_of(row) for row in ready]


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
