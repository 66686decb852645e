"""Episodes as they were recorded: read for the trainer's claims and for `pawl export`."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Row, Select, Text, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.assembly import assemble, whole_texts
from store.errors import Damaged
from store.records import Episode
from store.tables import episodes, feedback, tool_events, transitions

BATCH = 200
# Of the episodes that cannot be read back so many are named in a message.
TOLD = 5


async def episode_ids(
    connection: AsyncConnection,
    *,
    since: datetime | None = None,
    agent: str | None = None,
    policy: str | None = None,
) -> list[UUID]:
    """Ids of the episodes that match (see `matching`), oldest first."""
    found = await connection.execute(matching(since=since, agent=agent, policy=policy))
    return list(found.scalars())


def matching(
    *, since: datetime | None = None, agent: str | None = None, policy: str | None = None
) -> Select[tuple[UUID]]:
    """The query for episodes' ids, oldest first.

    `since` is compared with an episode's last call; `agent` and `policy` with its calls.
    """
    whole = func.coalesce(episodes.c.root, episodes.c.id)
    query = select(episodes.c.id).where(episodes.c.root.is_(None))
    if since is not None:
        query = query.where(
            episodes.c.id.in_(select(whole).where(episodes.c.last_call_at >= since))
        )
    for column, wanted in (("agent", agent), ("policy", policy)):
        if wanted is not None:
            matching = select(transitions.c.episode_id).where(transitions.c[column] == wanted)
            query = query.where(episodes.c.id.in_(select(whole).where(episodes.c.id.in_(matching))))
    return query.order_by(episodes.c.first_call_id)


class Reading(NamedTuple):
    """Episodes in the order that was asked for; and why the others cannot be read back."""

    episodes: list[Episode]
    damaged: dict[UUID, str]


async def read_episodes(connection: AsyncConnection, ids: Sequence[UUID]) -> list[Episode]:
    """The episodes of `ids`, in that order, each with its calls, events and feedback.

    Raises:
        Damaged: a call cannot be read back.
    """
    found = await read(connection, ids)
    if found.damaged:
        raise Damaged(what_is(found.damaged), found.damaged)
    return found.episodes


def what_is(damaged: Mapping[UUID, str]) -> str:
    """A message about a reading's `damaged`: the first few, and how many more."""
    told = "; ".join(list(damaged.values())[:TOLD])
    return told if len(damaged) <= TOLD else f"{told}; and {len(damaged) - TOLD} more"


async def read_in_batches(
    connection: AsyncConnection, ids: Sequence[UUID]
) -> AsyncIterator[Reading]:
    """The episodes of `ids`, in that order, `BATCH` at a time."""
    for start in range(0, len(ids), BATCH):
        yield await read(connection, ids[start : start + BATCH])


async def read(connection: AsyncConnection, ids: Sequence[UUID]) -> Reading:
    """What can be read of the episodes of `ids`."""
    wanted = list(ids)
    parts = await _rows(
        connection,
        select(episodes)
        .where(or_(episodes.c.id.in_(wanted), episodes.c.root.in_(wanted)))
        .order_by(episodes.c.first_call_id),
    )
    whole_of = {part.id: part.root if part.root in wanted else part.id for part in parts}
    all_parts = list(whole_of)
    calls = await _rows(connection, _CALLS.where(transitions.c.episode_id.in_(all_parts)))
    events = await _rows(connection, _EVENTS.where(tool_events.c.episode_id.in_(all_parts)))
    said = await _rows(connection, _FEEDBACK.where(feedback.c.episode_id.in_(all_parts)))
    texts = whole_texts([*calls, *await _bases(connection, calls)])
    calls_of, events_of, said_of = (_grouped(rows, whole_of) for rows in (calls, events, said))
    members: dict[UUID, list[Row[Any]]] = {}
    for part in parts:
        members.setdefault(whole_of[part.id], []).append(part)
    found = Reading([], {})
    for whole in wanted:
        if whole not in members:
            continue
        own, tools, statements = (of.get(whole, []) for of in (calls_of, events_of, said_of))
        try:
            found.episodes.append(assemble(members[whole], own, tools, statements, texts))
        except Damaged as error:
            found.damaged[whole] = f"episode {members[whole][0].key!r} cannot be read back: {error}"
    return found


# JSON comes as text (the driver would parse it): it is parsed call by call, so that one that
# cannot be parsed is the damage of its episode and not the end of the query.
_AS_TEXT: Final = ("sampling", "tool_calls")
_CALLS = select(
    *[
        cast(column, Text).label(column.name) if column.name in _AS_TEXT else column
        for column in transitions.c
        if column.name not in ("request_raw", "reply_raw", "usage")
    ]
).order_by(transitions.c.id)
_EVENTS = select(tool_events).order_by(tool_events.c.at, tool_events.c.id)
_FEEDBACK = select(feedback).order_by(feedback.c.at, feedback.c.id)


async def _rows(connection: AsyncConnection, query: Any) -> Sequence[Row[Any]]:
    return (await connection.execute(query)).all()


async def _bases(connection: AsyncConnection, calls: Sequence[Row[Any]]) -> list[Row[Any]]:
    """The calls that these add to, and that are not among them.

    They are other episodes' only where a join by what was said is in doubt.
    """
    found: list[Row[Any]] = []
    known = {row.id for row in calls}
    missing = {row.parent_id for row in calls if row.parent_id is not None} - known
    while missing:
        rows = await _rows(connection, _CALLS.where(transitions.c.id.in_(missing)))
        found += rows
        known |= missing
        missing = {row.parent_id for row in rows if row.parent_id is not None} - known
    return found


def _grouped(rows: Iterable[Row[Any]], whole_of: Mapping[UUID, UUID]) -> dict[UUID, list[Row[Any]]]:
    found: dict[UUID, list[Row[Any]]] = {}
    for row in rows:
        found.setdefault(whole_of[row.episode_id], []).append(row)
    return found
