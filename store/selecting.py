"""Select whole episodes: by key or id, or by conditions such as a task, a time or an API key.

Tasks of selected episodes can be kept for evaluation (`pawl export --hold-out`).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Row, Select, and_, exists, func, literal, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claim_query import lock_episodes
from store.errors import UnknownNames
from store.ids import lowest_id_at
from store.link.claimable import refresh_policy_rows
from store.read.episodes import is_of_tenant
from store.records import EVAL, TRAIN, Record
from store.schema.tables import SPLIT, api_keys, episodes, feedback, feedback_requests, transitions
from store.tenants import DEFAULT, bare, scoped, tenant_of
from store.tombstones import key_once_deleted


class FoundEpisodes(Record, frozen=True, kw_only=True):
    """Result of resolving episode names, as stored (`store.tenants`): found, deleted, unknown."""

    wholes: tuple[UUID, ...] = ()
    deleted_before: Mapping[str, UUID] = {}
    unknown: tuple[str, ...] = ()


class Selection(Record, frozen=True, kw_only=True):
    """Conditions that select whole episodes: all must hold; None is no condition.

    Attributes:
        tenant: the episodes' tenant; without it, task, prefix and key are the default tenant's.
        task: the episode's task is this one.
        prefix: the key of the episode, or of a part of it, begins with this text.
        agent: a call of the episode is by this agent.
        policy: a call of the episode is of this policy.
        key: a call or feedback of the episode came with the API key of this name or id.
        since: the episode's last call was at or after this time.
        before: the episode's last call was before this time.
        begun_before: the episode's first call was before this time.
        scored_since: the episode has feedback from this time or later.
        scored_before: the episode has feedback from before this time; with `scored_since`, one
            statement has to be from between the two times.
    """

    tenant: str | None = None
    task: str | None = None
    prefix: str | None = None
    agent: str | None = None
    policy: str | None = None
    key: str | None = None
    since: datetime | None = None
    before: datetime | None = None
    begun_before: datetime | None = None
    scored_since: datetime | None = None
    scored_before: datetime | None = None


ALL: Final = Selection()
_WHOLE = func.coalesce(episodes.c.root, episodes.c.id)
_PART = episodes.alias("part")


async def find_named_episodes(connection: AsyncConnection, names: Sequence[str]) -> FoundEpisodes:
    """Look up stored names: each is an episode's key, or its id prefixed with its tenant."""
    wholes: dict[UUID, None] = {}
    deleted: dict[str, UUID] = {}
    unknown: list[str] = []
    for name in names:
        row = await _row_named(connection, name)
        if row is None:
            unknown.append(name)
        elif row.deleted_at is not None:
            deleted[name] = row.whole
        else:
            wholes[row.whole] = None
    return FoundEpisodes(wholes=tuple(wholes), deleted_before=deleted, unknown=tuple(unknown))


async def _row_named(connection: AsyncConnection, name: str) -> Row[Any] | None:
    try:
        as_id = UUID(bare(name))
    except ValueError:
        as_id = None
    # The tenant of a deleted episode is no longer known.
    by_id = and_(
        episodes.c.id == as_id,
        or_(is_of_tenant(tenant_of(name)), episodes.c.deleted_at.is_not(None)),
    )
    query = select(_WHOLE.label("whole"), episodes.c.deleted_at).where(
        or_(episodes.c.key.in_([name, key_once_deleted(name)]), by_id)
    )
    # An episode whose key is the name comes before one whose id is.
    return (await connection.execute(query.order_by(episodes.c.key != literal(name)))).first()


async def select_episodes(connection: AsyncConnection, selection: Selection = ALL) -> list[UUID]:
    """Return the episodes of a selection that are not deleted, oldest first.

    Raises:
        UnknownNames: the tenant never had an API key with the name or id `selection.key`.
    """
    query = selection_query(selection)
    if selection.key is not None:
        keys = await _key_ids(connection, selection.tenant or DEFAULT, selection.key)
        called = (transitions.c.episode_id == _PART.c.id, transitions.c.api_key.in_(keys))
        stated = (
            feedback.c.episode_id == _PART.c.id,
            feedback.c.request_id == feedback_requests.c.id,
            feedback_requests.c.api_key.in_(keys),
        )
        query = query.where(or_(_any_part(*called), _any_part(*stated)))
    return list((await connection.execute(query)).scalars())


def selection_query(selection: Selection) -> Select[tuple[UUID]]:
    """Build the query for the episodes of a selection; `selection.key` is ignored."""
    query = select(episodes.c.id).where(episodes.c.root.is_(None), episodes.c.deleted_at.is_(None))
    query = query.where(*_episode_conditions(selection), *_feedback_conditions(selection))
    return query.order_by(episodes.c.first_call_id)


def _episode_conditions(selection: Selection) -> list[ColumnElement[bool]]:
    tenant = selection.tenant or DEFAULT
    conditions = [] if selection.tenant is None else [is_of_tenant(tenant)]
    if selection.task is not None:
        task = func.coalesce(episodes.c.joined_task, episodes.c.task)
        conditions.append(task == scoped(tenant, selection.task))
    if selection.prefix is not None:
        stored_prefix = scoped(tenant, selection.prefix)
        conditions.append(_any_part(_PART.c.key.startswith(stored_prefix, autoescape=True)))
    for column in ("agent", "policy"):
        if (wanted := getattr(selection, column)) is not None:
            own = select(transitions.c.episode_id).where(transitions.c[column] == wanted)
            conditions.append(_any_part_by_index(episodes.c.id.in_(own)))
    if selection.since is not None:
        conditions.append(_any_part_by_index(episodes.c.last_call_at >= selection.since))
    if selection.before is not None:
        last_of_parts = select(func.max(_PART.c.last_call_at)).where(_PART.c.root == episodes.c.id)
        last_call = func.greatest(episodes.c.last_call_at, last_of_parts.scalar_subquery())
        conditions.append(last_call < selection.before)
    if selection.begun_before is not None:
        begun = _PART.c.first_call_id < lowest_id_at(selection.begun_before)
        conditions.append(_any_part(begun))
    return conditions


def _feedback_conditions(selection: Selection) -> list[ColumnElement[bool]]:
    within: list[ColumnElement[bool]] = []
    if selection.scored_since is not None:
        within.append(feedback.c.at >= selection.scored_since)
    if selection.scored_before is not None:
        within.append(feedback.c.at < selection.scored_before)
    return [_any_part(feedback.c.episode_id == _PART.c.id, *within)] if within else []


def _any_part_by_index(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the same as `_any_part`, in a form that can use an index for `condition`."""
    return episodes.c.id.in_(select(_WHOLE).where(condition))


def _any_part(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that the episode itself, or a part of it, meets all conditions."""
    is_part = or_(_PART.c.id == episodes.c.id, _PART.c.root == episodes.c.id)
    return exists().where(is_part, *conditions)


async def _key_ids(connection: AsyncConnection, tenant: str, key: str) -> list[str]:
    query = select(api_keys.c.id).where(
        api_keys.c.tenant == tenant, or_(api_keys.c.name == key, api_keys.c.id == key)
    )
    ids = list((await connection.execute(query)).scalars())
    if not ids:
        raise UnknownNames(
            f"no API key is or was named {key!r:.80}, or has that id, and nothing was"
            " changed: `pawl keys list` shows the keys"
        )
    return ids


# Tasks that are kept for evaluation

_TASK: Final = "COALESCE(e.joined_task, e.task)"
_UNTRAINED: Final = text(
    f"""
    SELECT e.id, {_TASK} AS task FROM episodes e
    WHERE e.root IS NULL AND e.deleted_at IS NULL AND {SPLIT} = '{TRAIN}'
        AND {_TASK} IN (SELECT {_TASK} FROM episodes e WHERE e.id = ANY(:ids))
        AND {_TASK} NOT IN (
            SELECT {_TASK} FROM episode_policies p JOIN episodes e ON e.id = p.episode_id
            WHERE p.claimed_by IS NOT NULL AND {_TASK} IS NOT NULL)
    """
)
_HOLD_OUT: Final = text(
    f"""
    UPDATE episodes SET split = '{EVAL}',
        joined_split = CASE WHEN joined_split IS NOT NULL THEN '{EVAL}' END
    WHERE id = ANY(:ids) OR root = ANY(:ids)
    """
)


async def untrained_tasks(
    connection: AsyncConnection, ids: Sequence[UUID]
) -> dict[str, list[UUID]]:
    """Map tasks of these episodes to all their episodes; a task with a claimed one is left out.

    Episodes that are evaluation already are left out.
    """
    of_task: dict[str, list[UUID]] = {}
    for row in await connection.execute(_UNTRAINED, {"ids": list(ids)}):
        of_task.setdefault(row.task, []).append(row.id)
    return of_task


async def keep_for_evaluation(connection: AsyncConnection, ids: Sequence[UUID]) -> None:
    """Move these episodes to the split `eval`, for good: an update of one cannot be recorded."""
    await lock_episodes(connection, ids)
    await connection.execute(_HOLD_OUT, {"ids": list(ids)})
    await refresh_policy_rows(connection, ids)
