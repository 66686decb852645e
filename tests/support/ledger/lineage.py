"""Make the versions of a policy as updates do, and move them to a state as the product would."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import func, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from store import version_states
from store.ids import new_id
from store.schema.tables import policies, policy_events, updates
from store.version_states import (
    ALLOWED_TRANSITIONS,
    STATES_WITHOUT_TRAFFIC,
    add_version,
    ensure_base,
    lock_version,
)
from store.versions import Actor, PolicyState

# The reason of a change that a test makes.
TEST = "for the test"
# A version that is retired, and that no server keeps, is `unloaded` here.
State = PolicyState | Literal["unloaded"]


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
    state: State,
    *,
    parent: int = 0,
    ago_s: float = 0.0,
    deleted: bool = False,
) -> None:
    """Add a version that came to be in `state` so many seconds ago, without the way there.

    What is retired or rolled back had the traffic. What is `deleted` and not rejected is unloaded.
    """
    then = func.now() - timedelta(seconds=ago_s)
    is_unloaded = state == "unloaded" or (deleted and state != "rejected")
    await connection.execute(
        insert(policies).values(
            name=name,
            version=version,
            state="retired" if state == "unloaded" else state,
            served_name=f"{name}@{version}",
            adapter_path="/a",
            update_id=await _updated(connection, name, version, parent),
            changed_at=then,
            files_deleted_at=func.now() if deleted else None,
            unloaded_at=then if is_unloaded else None,
        )
    )
    if state not in ("written", "loaded", "rejected"):
        to = "canary" if state == "canary" else "serving"
        why = {"from_state": "loaded", "to_state": to, "reason": TEST, "actor": "operator"}
        event = insert(policy_events).values(id=new_id(), name=name, version=version, at=then)
        await connection.execute(event.values(**why))


def path_to(start: PolicyState, end: PolicyState) -> list[PolicyState]:
    """Return the states on the shortest way from one state to another, without the first."""
    paths: dict[PolicyState, list[PolicyState]] = {start: []}
    waiting = [start]
    for state in waiting:
        for following in sorted(ALLOWED_TRANSITIONS[state]):
            if following not in paths:
                paths[following] = [*paths[state], following]
                waiting.append(following)
    return paths[end]


async def set_state(
    connection: AsyncConnection,
    name: str,
    version: int,
    state: State,
    *,
    reason: str = TEST,
    actor: Actor = "operator",
) -> None:
    """Move a version to `state` by the shortest way that is allowed.

    What is retired was tried before, so that servers keep it, unless it is to be `unloaded`.
    """
    current = await lock_version(connection, name, version)
    end: PolicyState = "retired" if state == "unloaded" else state
    path = path_to(current.state, end)
    if end == "retired" and current.state in STATES_WITHOUT_TRAFFIC:
        path = [*path_to(current.state, "canary"), "retired"]
    for following in path:
        await version_states.set_state(
            connection, name, version, following, reason=reason, actor=actor
        )
    if state == "unloaded":
        await unload(connection, name, version)


async def unload(connection: AsyncConnection, name: str, version: int) -> None:
    """Let no server keep a retired version, also one that a roll-back would give the traffic to."""
    own = (policies.c.name == name, policies.c.version == version)
    now = func.clock_timestamp()
    await connection.execute(
        update(policies).where(*own).values(unloaded_at=now, changed_at=now, share=None)
    )


async def load(
    connection: AsyncConnection, name: str, version: int, rule: Mapping[str, Any], **why: Any
) -> None:
    """Move a written version to state `loaded`, to be judged by `rule`."""
    await version_states.lock_policies(connection, [name])
    own = (policies.c.name == name, policies.c.version == version)
    await connection.execute(update(policies).where(*own).values(gate=dict(rule)))
    await version_states.make_loaded(connection, name, version, **why)


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
        await load(connection, name, version, rule or {}, **why)
    elif current.unloaded:
        await version_states.recall(connection, name, version, **why)
    await version_states.promote(connection, name, version, **why, **more)
