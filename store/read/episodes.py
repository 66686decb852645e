"""Read episodes as they were recorded, for the trainer's claims and for `pawl export`."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import ColumnElement, Row, Text, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import Damaged
from store.read.assembly import FullTexts, Texts, assemble, full_texts, group_rows
from store.records import Episode
from store.schema.tables import consumptions, episodes, feedback, tool_events, transitions, updates
from store.tenants import SEPARATOR, bare, stored_prefix

BATCH = 200
# Most unreadable episodes that a message names.
MAX_NAMED = 5


def is_of_tenant(tenant: str) -> ColumnElement[bool]:
    begins = stored_prefix(tenant)
    if begins is None:
        # A key with no tenant before a separator, or without a separator, is the default tenant's.
        return func.strpos(episodes.c.key, SEPARATOR) <= 1
    return episodes.c.key.startswith(begins, autoescape=True)


class ReadEpisodes(NamedTuple):
    """Episodes in the order of the requested ids, and by id why others cannot be read back."""

    episodes: list[Episode]
    damaged: dict[UUID, str]


async def read_episodes(connection: AsyncConnection, ids: Sequence[UUID]) -> list[Episode]:
    """Read the episodes of `ids`, in that order, each with its calls, events and feedback.

    Ids that are not stored are left out.

    Raises:
        Damaged: at least one episode cannot be read back.
    """
    reading = await read_undamaged(connection, ids)
    if reading.damaged:
        named = "; ".join(list(reading.damaged.values())[:MAX_NAMED])
        more = len(reading.damaged) - MAX_NAMED
        raise Damaged(f"{named}; and {more} more" if more > 0 else named, reading.damaged)
    return reading.episodes


async def read_in_batches(
    connection: AsyncConnection, ids: Sequence[UUID]
) -> AsyncIterator[ReadEpisodes]:
    """Yield the result of `read_undamaged` for each `BATCH` of `ids`, in their order."""
    for start in range(0, len(ids), BATCH):
        yield await read_undamaged(connection, ids[start : start + BATCH])


async def read_undamaged(connection: AsyncConnection, ids: Sequence[UUID]) -> ReadEpisodes:
    """Read the episodes of `ids` that can be read back, and say why the others cannot.

    Ids that are not stored are left out.
    """
    wanted = list(ids)
    parts = await _fetch_rows(
        connection,
        select(episodes)
        .where(or_(episodes.c.id.in_(wanted), episodes.c.root.in_(wanted)))
        .order_by(episodes.c.first_call_id),
    )
    whole_of = {part.id: part.root if part.root in wanted else part.id for part in parts}
    all_parts = list(whole_of)
    calls = await _fetch_rows(connection, _CALLS.where(transitions.c.episode_id.in_(all_parts)))
    events = await _fetch_rows(connection, _EVENTS.where(tool_events.c.episode_id.in_(all_parts)))
    items = await _fetch_rows(connection, _FEEDBACK.where(feedback.c.episode_id.in_(all_parts)))
    texts = await _rebuild_texts(connection, calls)
    # The claim time of the first update that trained on each episode.
    trained = await _fetch_rows(
        connection,
        select(consumptions.c.episode_id, func.min(updates.c.claimed_at).label("at"))
        .join(updates, updates.c.id == consumptions.c.update_id)
        .where(consumptions.c.episode_id.in_(wanted), consumptions.c.trained)
        .group_by(consumptions.c.episode_id),
    )
    trained_at = {row.episode_id: row.at for row in trained}
    parts_of = group_rows(parts, lambda part: whole_of[part.id])
    calls_of, events_of, items_of = (
        group_rows(rows, lambda row: whole_of[row.episode_id]) for rows in (calls, events, items)
    )
    reading = ReadEpisodes([], {})
    for whole in wanted:
        if whole not in parts_of:
            continue
        own, tools, statements = (of.get(whole, []) for of in (calls_of, events_of, items_of))
        try:
            reading.episodes.append(
                assemble(parts_of[whole], own, tools, statements, texts, trained_at.get(whole))
            )
        except Damaged as error:
            key = bare(parts_of[whole][0].key)
            reading.damaged[whole] = f"episode {key!r} cannot be read back: {error}"
    return reading


# The driver would parse JSON columns, and one invalid document would fail the whole query. As text
# they are parsed call by call, so that an invalid document damages its own episode only.
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


async def _fetch_rows(connection: AsyncConnection, query: Any) -> Sequence[Row[Any]]:
    return (await connection.execute(query)).all()


async def full_texts_of_calls(
    connection: AsyncConnection, ids: Sequence[UUID]
) -> dict[UUID, Texts]:
    """Return request and prompt ids of these calls, rebuilt in full; damaged calls are left out."""
    calls = await _fetch_rows(connection, _CALLS.where(transitions.c.id.in_(list(ids))))
    texts = await _rebuild_texts(connection, calls)
    return {row.id: texts.of[row.id] for row in calls if row.id in texts.of}


async def _rebuild_texts(connection: AsyncConnection, calls: Sequence[Row[Any]]) -> FullTexts:
    """Rebuild the texts of calls, after reading the bases that they are stored as additions to.

    A base belongs to another episode only if a join by conversation prefix is in doubt.
    """
    all_calls = list(calls)
    known = {row.id for row in calls}
    missing = {row.parent_id for row in calls if row.parent_id is not None} - known
    while missing:
        rows = await _fetch_rows(connection, _CALLS.where(transitions.c.id.in_(missing)))
        all_calls += rows
        known |= missing
        missing = {row.parent_id for row in rows if row.parent_id is not None} - known
    return full_texts(all_calls)
