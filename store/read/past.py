"""Read finished updates, with the episodes as they were when the update claimed them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claims import IMPORTED_FROM, Claim, Outcome, load_claim
from store.errors import UnknownUpdate
from store.ids import time_of
from store.records import Episode, Record, TransitionRow
from store.schema.tables import consumptions, episodes, policies, updates


class PastUpdate(Record, frozen=True, kw_only=True):
    """A finished update: its claim, recipe, recorded metrics and outcomes."""

    claim: Claim
    recipe: Mapping[str, Any]
    metrics: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]


async def past_update(
    connection: AsyncConnection,
    which: int | UUID,
    policy: str | None = None,
    tenant: str | None = None,
) -> PastUpdate:
    """Read the update that made version `which`, or that has the id `which`.

    If several policies have that version, `policy` selects one; with `tenant` only those of this
    tenant are looked at. Calls and feedback that came after the claim are left out.

    Raises:
        UnknownUpdate: there is no such update, or several, or it is not finished, or it imported
            its version, or an episode that it consumed was deleted.
        Damaged: a call cannot be read back.
    """
    row = await _find_update(connection, which, policy, tenant)
    await _refuse_deleted(connection, row.id)
    then = row.claimed_at
    claim = await load_claim(connection, row.id)
    groups = tuple(
        msgspec.structs.replace(
            group,
            episodes=tuple(episode_at(episode, then) for episode in group.episodes),
            earlier=tuple(episode_at(episode, then) for episode in group.earlier),
        )
        for group in claim.groups
    )
    spent = await connection.execute(select(consumptions).where(consumptions.c.update_id == row.id))
    return PastUpdate(
        claim=msgspec.structs.replace(claim, groups=groups),
        recipe=row.recipe,
        metrics=row.metrics,
        outcomes=tuple(
            Outcome(episode_id=one.episode_id, trained=one.trained, reason=one.reason)
            for one in spent
        ),
    )


async def _find_update(
    connection: AsyncConnection, which: int | UUID, policy: str | None, tenant: str | None
) -> Row[Any]:
    column = updates.c.version if isinstance(which, int) else updates.c.id
    query = select(updates).where(column == which)
    if policy is not None:
        query = query.where(updates.c.policy == policy)
    if tenant is not None:
        own = select(policies.c.name).where(policies.c.tenant == tenant)
        query = query.where(updates.c.policy.in_(own))
    rows = (await connection.execute(query.order_by(updates.c.policy))).all()
    name = f"version {which}" if isinstance(which, int) else f"update {which}"
    if not rows:
        problem = f"no update made {name}" if isinstance(which, int) else f"there is no {name}"
        raise UnknownUpdate(f"{problem}: `pawl policies show` lists a policy's versions")
    if len(rows) > 1:
        names = ", ".join(row.policy for row in rows)
        raise UnknownUpdate(f"several policies have {name}: name one of {names} (--policy)")
    if rows[0].state != "done":
        raise UnknownUpdate(f"{name} is {rows[0].state}: only finished updates (done) can be read")
    if IMPORTED_FROM in rows[0].metrics:
        source = rows[0].metrics[IMPORTED_FROM]
        raise UnknownUpdate(f"{name} was imported from {source}: no episodes were trained for it")
    return rows[0]


async def _refuse_deleted(connection: AsyncConnection, update_id: UUID) -> None:
    """Raise `UnknownUpdate` if an episode that the update consumed was deleted."""
    query = (
        select(func.count())
        .select_from(consumptions)
        .join(episodes, episodes.c.id == consumptions.c.episode_id)
        .where(consumptions.c.update_id == update_id, episodes.c.deleted_at.is_not(None))
    )
    if deleted := await connection.scalar(query):
        raise UnknownUpdate(
            f"{deleted} episodes of update {update_id} were deleted since: its results cannot be "
            "computed again, but `pawl policies show` has the recorded figures"
        )


def episode_at(episode: Episode, moment: datetime) -> Episode:
    """Return the episode without calls, tool events and feedback from after `moment`.

    A tool event that was replaced after `moment` is missing, because only the newest is read.
    """
    return msgspec.structs.replace(
        episode,
        calls=tuple(_call_at(call, moment) for call in episode.calls if time_of(call.id) <= moment),
        feedback=tuple(item for item in episode.feedback if item.at <= moment),
    )


def _call_at(call: TransitionRow, moment: datetime) -> TransitionRow:
    return msgspec.structs.replace(
        call,
        tool_events=tuple(event for event in call.tool_events if event.at and event.at <= moment),
        feedback=tuple(item for item in call.feedback if item.at <= moment),
    )
