"""Read how the states of policy versions changed, and why."""

from typing import Any
from uuid import UUID

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema.trained import policy_events
from store.versions import PolicyEvent


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
    return [_event_of(row) for row in rows]


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


def _event_of(row: Row[Any]) -> PolicyEvent:
    return PolicyEvent(**row._mapping)
