"""Updates that ran: what each was made of, as it was when it claimed its episodes."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claims import Claim, Outcome, load_claim
from store.errors import UnknownUpdate
from store.ids import time_of
from store.records import Episode, Group, Record, TransitionRow
from store.tables import consumptions, updates


class PastUpdate(Record, frozen=True, kw_only=True):
    """An update that is over: its claim and recipe, and what it wrote down of itself."""

    claim: Claim
    recipe: Mapping[str, Any]
    metrics: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]


async def past_update(
    connection: AsyncConnection, which: int | UUID, policy: str | None = None
) -> PastUpdate:
    """The update that made version `which` (of `policy`, where several have it), or of that id.

    Its claim is without what was called and said since.

    Raises:
        UnknownUpdate: there is none, or several; or it is not over.
        Damaged: a call cannot be read back.
    """
    row = await _find(connection, which, policy)
    claim = await load_claim(connection, row.id)
    spent = await connection.execute(select(consumptions).where(consumptions.c.update_id == row.id))
    return PastUpdate(
        claim=msgspec.structs.replace(
            claim, groups=tuple(_group_at(group, row.claimed_at) for group in claim.groups)
        ),
        recipe=row.recipe,
        metrics=row.metrics,
        outcomes=tuple(
            Outcome(episode_id=one.episode_id, trained=one.trained, reason=one.reason)
            for one in spent
        ),
    )


async def _find(connection: AsyncConnection, which: int | UUID, policy: str | None) -> Row[Any]:
    column = updates.c.version if isinstance(which, int) else updates.c.id
    query = select(updates).where(column == which)
    if policy is not None:
        query = query.where(updates.c.policy == policy)
    rows = (await connection.execute(query.order_by(updates.c.policy))).all()
    name = f"version {which}" if isinstance(which, int) else f"update {which}"
    if not rows:
        raise UnknownUpdate(f"no update made {name}" if isinstance(which, int) else f"no {name}")
    if len(rows) > 1:
        policies = ", ".join(row.policy for row in rows)
        raise UnknownUpdate(f"{name} is of several policies: name one of {policies}")
    if rows[0].state != "done":
        raise UnknownUpdate(f"{name} is {rows[0].state}: it consumed nothing that could be told of")
    return rows[0]


def _group_at(group: Group, moment: datetime) -> Group:
    return msgspec.structs.replace(
        group,
        episodes=tuple(episode_at(episode, moment) for episode in group.episodes),
        earlier=tuple(episode_at(episode, moment) for episode in group.earlier),
    )


def episode_at(episode: Episode, moment: datetime) -> Episode:
    """The episode without what was called and said after `moment`.

    A tool event that was stated anew later is missing: only the newest statement is read.
    """
    return msgspec.structs.replace(
        episode,
        calls=tuple(_call_at(call, moment) for call in episode.calls if time_of(call.id) <= moment),
        feedback=tuple(said for said in episode.feedback if said.at <= moment),
    )


def _call_at(call: TransitionRow, moment: datetime) -> TransitionRow:
    return msgspec.structs.replace(
        call,
        tool_events=tuple(event for event in call.tool_events if time_of(event.id) <= moment),
        feedback=tuple(said for said in call.feedback if said.at <= moment),
    )
