"""Put the last version of a rebuilt line in the place of the line that it replaces.

An operator asked for it, because what the old line learned is in doubt. So no gate decides about
it, and of the old line nothing gets, or keeps, a share of the new episodes.
"""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.read.pages import version_of
from store.schema.trained import policies
from store.version_states import change_state, lock_policies, promote, set_state
from store.versions import Actor, PolicyState

OPERATOR: Final[Actor] = "operator"
# What waits for the traffic, or for a share of it: it never had any.
_WAITING: Final[tuple[PolicyState, ...]] = ("written", "ready", "candidate")
# What is kept for episodes that began with it.
_KEPT: Final[tuple[PolicyState, ...]] = ("published", "rolled_back")


async def offer(connection: AsyncConnection, policy: str, head: int, without: int) -> None:
    """Make the rebuilt line's last version, which has an adapter, one that is written.

    It is published as any other then, by whoever comes first. `without` is how many episodes were
    left out.

    Raises:
        RolledBack: it was rolled back since it was rebuilt.
    """
    why = f"its line was trained again without {without} episodes, and is whole"
    await set_state(connection, policy, head, "written", reason=why, actor=OPERATOR)


async def replace(connection: AsyncConnection, policy: str, head: int, without: int) -> list[str]:
    """Give the traffic to the rebuilt line's last version, and end all versions of the old line.

    Episodes that began with one of them go on with `head`. Return the names of those that ended.

    Raises:
        RolledBack: `head` was rolled back.
    """
    why = f"its line was trained again without {without} episodes"
    await promote(connection, policy, head, reason=why, actor=OPERATOR)
    return await _end(connection, policy, head, without, (*_WAITING, "canary", *_KEPT))


async def end_others(
    connection: AsyncConnection, policy: str, head: int, without: int
) -> list[str]:
    """End what is tried against `head`, which serves, or waits to be; return the names.

    That is if the rebuilt line has come to the weights that serve already.
    """
    await lock_policies(connection, [policy])
    return await _end(connection, policy, head, without, (*_WAITING, "canary"))


async def _end(
    connection: AsyncConnection,
    policy: str,
    head: int,
    without: int,
    states: Sequence[PolicyState],
) -> list[str]:
    """Reject what had no traffic, and retire what had some, but for `head` and the base model.

    A canary is not rolled back: the rebuilt line may have begun at it, and go on from it.
    """
    query = (
        select(policies)
        .where(policies.c.name == policy, policies.c.version.not_in((0, head)))
        .where(policies.c.state.in_(states))
        .order_by(policies.c.version)
        .with_for_update(key_share=True)
    )
    why = f"rebuilt as {policy}@{head} without {without} episodes"
    ended = []
    for row in (await connection.execute(query)).all():
        to: PolicyState = "rejected" if row.state in _WAITING else "retired"
        await change_state(connection, version_of(row), to, reason=why, actor=OPERATOR)
        ended.append(row.served_name)
    return sorted(ended)
