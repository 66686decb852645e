"""Choose the episodes to delete: by name, or all that share a task, a beginning or a time."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Select, and_, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.deleting.names import key_once_deleted
from store.read.episodes import is_of
from store.records import Record
from store.schema.recorded import episodes
from store.tenants import DEFAULT, bare, scoped, tenant_of


class Chosen(Record, frozen=True, kw_only=True):
    """Hold what names stand for: episodes, rows of deleted ones by name, and unknown names.

    Names are as they are kept (`store.tenants`).
    """

    wholes: tuple[UUID, ...] = ()
    deleted_before: Mapping[str, UUID] = {}
    unknown: tuple[str, ...] = ()


class Selection(Record, frozen=True, kw_only=True):
    """Select whole episodes of a tenant that meet all conditions; a field of None selects all.

    Attributes:
        tenant: whose episodes; task and prefix are names of this tenant.
        task: the episode's task is this one.
        prefix: the key of the episode, or of a part of it, begins with this text.
        since: the episode's last call was at or after this time.
        before: the episode's last call was before this time.
    """

    tenant: str = DEFAULT
    task: str | None = None
    prefix: str | None = None
    since: datetime | None = None
    before: datetime | None = None


class _Found(NamedTuple):
    whole: UUID
    deleted: bool


_WHOLE = func.coalesce(episodes.c.root, episodes.c.id)


async def named(connection: AsyncConnection, names: Sequence[str]) -> Chosen:
    """Look names up: each is an episode's key, or its id as a name of its tenant."""
    wholes: dict[UUID, None] = {}
    before: dict[str, UUID] = {}
    unknown: list[str] = []
    for name in names:
        episode = await _find(connection, name)
        if episode is None:
            unknown.append(name)
        elif episode.deleted:
            before[name] = episode.whole
        else:
            wholes[episode.whole] = None
    return Chosen(wholes=tuple(wholes), deleted_before=before, unknown=tuple(unknown))


async def _find(connection: AsyncConnection, name: str) -> _Found | None:
    # Of what was deleted it is not known any more whose it was.
    by_id = and_(
        episodes.c.id == _id_of(bare(name)),
        or_(is_of(tenant_of(name)), episodes.c.deleted_at.is_not(None)),
    )
    query = select(_WHOLE.label("whole"), episodes.c.deleted_at).where(
        or_(episodes.c.key.in_([name, key_once_deleted(name)]), by_id)
    )
    # A key counts before the id that equals it.
    row = (await connection.execute(query.order_by(episodes.c.key != literal(name)))).first()
    return None if row is None else _Found(row.whole, row.deleted_at is not None)


def _id_of(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None


async def selected(connection: AsyncConnection, selection: Selection) -> list[UUID]:
    """Return the episodes of a selection, oldest first."""
    return list((await connection.execute(selecting(selection))).scalars())


def selecting(selection: Selection) -> Select[tuple[UUID]]:
    """Build the query for the ids of a selection, oldest first."""
    part = episodes.alias("part")
    of_parts = select(part).where(or_(part.c.id == episodes.c.id, part.c.root == episodes.c.id))
    last_call = func.greatest(
        episodes.c.last_call_at,
        select(func.max(part.c.last_call_at)).where(part.c.root == episodes.c.id).scalar_subquery(),
    )
    query = select(episodes.c.id).where(
        episodes.c.root.is_(None), episodes.c.deleted_at.is_(None), is_of(selection.tenant)
    )
    if selection.task is not None:
        task = func.coalesce(episodes.c.joined_task, episodes.c.task)
        query = query.where(task == scoped(selection.tenant, selection.task))
    if selection.prefix is not None:
        kept = scoped(selection.tenant, selection.prefix)
        begins = part.c.key.startswith(kept, autoescape=True)
        query = query.where(of_parts.where(begins).exists())
    if selection.since is not None:
        query = query.where(last_call >= selection.since)
    if selection.before is not None:
        query = query.where(last_call < selection.before)
    return query.order_by(episodes.c.first_call_id)
