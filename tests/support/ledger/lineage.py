"""Make the versions of a policy as updates do, and move them to a state as the product would."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import func, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store import version_states
from store.ids import new_id
from store.schema.tables import policies, updates
from store.version_states import ALLOWED, add_version, ensure_base, lock_version
from store.versions import Actor, PolicyState

# The reason of a change that a test makes.
TEST = "for the test"


async def _updated(connection: AsyncConnection, name: str, version: int, parent: int) -> UUID:
    """Add an update that made `version` from `parent`, and return its id."""
    update_id = new_id()
    made = {"policy": name, "parent_version": parent, "version": version, "state": "done"}
    await connection.execute(insert(updates).values(id=update_id, recipe={}, **made))
    return update_id


async def trained(connection: AsyncConnection, *parents: int, name: str = "m") -> None:
    """Begin a policy, and add a written version for each of `parents`, numbered from 1."""
    await ensure_base(connection, name, "m")
    for number, parent in enumerate(parents, 1):
        update_id = await _updated(connection, name, number, parent)
        await add_version(connection, name, number, f"/{name}/{number}", update_id)


async def add_in_state(
    connection: AsyncConnection,
    name: str,
    version: int,
    state: str,
    *,
    parent: int = 0,
    ago_s: float = 0.0,
    unloaded: bool = False,
    deleted: bool = False,
) -> None:
    """Add a version that came to be in `state` so many seconds ago, without the way there.

    What is `deleted` and not rejected is unloaded too.
    """
    now = func.now()
    is_unloaded = unloaded or (deleted and state != "rejected")
    await connection.execute(
        insert(policies).values(
            name=name,
            version=version,
            state=state,
            served_name=f"{name}@{version}",
            adapter_path="/a",
            update_id=await _updated(connection, name, version, parent),
            changed_at=now - timedelta(seconds=ago_s),
            files_deleted_at=now if deleted else None,
            unloaded_at=now - timedelta(seconds=ago_s) if is_unloaded else None,
        )
    )


def path_to(start: PolicyState, end: PolicyState) -> list[PolicyState]:
    """Return the states on the shortest way from one state to another, without the first."""
    paths: dict[PolicyState, list[PolicyState]] = {start: []}
    waiting = [start]
    for state in waiting:
        for following in sorted(ALLOWED[state]):
            if following not in paths:
                paths[following] = [*paths[state], following]
                waiting.append(following)
    return paths[end]


async def set_state(
    connection: AsyncConnection,
    name: str,
    version: int,
    state: PolicyState,
    *,
    reason: str = TEST,
    actor: Actor = "operator",
) -> None:
    """Move a version to `state` by the shortest way that is allowed."""
    current = await lock_version(connection, name, version)
    for following in path_to(current.state, state):
        await version_states.set_state(
            connection, name, version, following, reason=reason, actor=actor
        )


async def promote(
    connection: AsyncConnection,
    name: str,
    version: int,
    *,
    reason: str = TEST,
    actor: Actor = "operator",
    rule: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """Give a version the traffic; one that no server has is loaded first, with `rule` or none."""
    await version_states.lock_policies(connection, [name])
    current = await lock_version(connection, name, version)
    why: dict[str, Any] = {"reason": reason, "actor": actor}
    if current.state == "written":
        await version_states.make_loaded(connection, name, version, rule or {}, **why)
    elif current.unloaded:
        await version_states.recall(connection, name, version, **why)
    await version_states.promote(connection, name, version, **why, **more)
