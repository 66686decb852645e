"""Find the episodes that a query of `pawl policies rebuild` stands for."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import ColumnElement, Select, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.deleting.choosing import Selection, named, selecting
from store.errors import StoreError
from store.ids import lowest_id_at
from store.records import Record
from store.schema.claimable import episode_policies
from store.schema.keys import api_keys
from store.schema.recorded import episodes, transitions
from store.schema.stated import feedback, feedback_requests
from store.tenants import scoped

# Names that a message shows.
TOLD = 5


class UnknownNames(StoreError):
    """Report names that no recorded episode has; nothing was changed."""


class Query(Record, frozen=True, kw_only=True):
    """Select a policy's whole episodes that meet all conditions; a field of None selects all.

    Attributes:
        episode: it has this key, or this id; the only condition then.
        task: its task is this one.
        prefix: its key, or that of a part of it, begins with this text.
        agent: it has a call of this agent.
        key: a call of it, or something said about it, came with this API key: its name or id.
        since: its last call was at or after this time.
        before: its first call was before this time.
        scored_since: something was said about it at or after this time.
        scored_before: something was said about it before this time; with `scored_since` the same
            statement is meant.
    """

    episode: str | None = None
    task: str | None = None
    prefix: str | None = None
    agent: str | None = None
    key: str | None = None
    since: datetime | None = None
    before: datetime | None = None
    scored_since: datetime | None = None
    scored_before: datetime | None = None


async def matching_episodes(
    connection: AsyncConnection, policy: str, tenant: str, queries: Sequence[Query]
) -> set[UUID]:
    """Return the episodes with a call of `policy` that one of the queries selects.

    Names are those of `tenant`, whose the policy is. Those that were deleted before are found by
    name alone.

    Raises:
        UnknownNames: no episode has such a name.
    """
    names = [scoped(tenant, one.episode) for one in queries if one.episode is not None]
    chosen = await named(connection, names)
    if chosen.unknown:
        shown = ", ".join(repr(name) for name in chosen.unknown[:TOLD])
        raise UnknownNames(
            f"{len(chosen.unknown)} of these episodes are not recorded ({shown}), and nothing was "
            "changed: correct the names, or leave them away if their calls wait in a spool"
        )
    ids = {*chosen.wholes, *chosen.deleted_before.values()}
    for query in queries:
        if query.episode is None:
            keys = await _keys(connection, tenant, query.key)
            ids |= set((await connection.execute(_selecting(tenant, query, keys))).scalars())
    return await _of_policy(connection, policy, ids)


async def _keys(connection: AsyncConnection, tenant: str, name: str | None) -> list[str]:
    """Return the ids of the tenant's keys that have, or had, this name or id.

    Raises:
        UnknownNames: none has.
    """
    if name is None:
        return []
    query = select(api_keys.c.id).where(
        api_keys.c.tenant == tenant, (api_keys.c.name == name) | (api_keys.c.id == name)
    )
    ids = list((await connection.execute(query)).scalars())
    if not ids:
        raise UnknownNames(
            f"no API key is or was named {name!r:.80}, or has that id, and nothing was changed: "
            "`pawl keys list` shows them"
        )
    return ids


async def _of_policy(connection: AsyncConnection, policy: str, ids: set[UUID]) -> set[UUID]:
    own = episode_policies.c.episode_id
    query = select(own).where(episode_policies.c.policy == policy, own.in_(ids))
    return set((await connection.execute(query)).scalars())


def _selecting(tenant: str, query: Query, keys: Sequence[str]) -> Select[tuple[UUID]]:
    """Build the query for the ids that a `Query` without a name selects; `keys` are its key's."""
    selection = Selection(tenant=tenant, task=query.task, prefix=query.prefix, since=query.since)
    built = selecting(selection)
    part = episodes.alias("each")
    whole = func.coalesce(part.c.root, part.c.id) == episodes.c.id
    if query.before is not None:
        begun = part.c.first_call_id < lowest_id_at(query.before)
        built = built.where(exists().where(whole, begun))
    if query.agent is not None:
        of_agent = (transitions.c.episode_id == part.c.id, transitions.c.agent == query.agent)
        built = built.where(exists().where(whole, *of_agent))
    if query.key is not None:
        called = (transitions.c.episode_id == part.c.id, transitions.c.api_key.in_(keys))
        stated = (
            feedback.c.episode_id == part.c.id,
            feedback.c.request_id == feedback_requests.c.id,
            feedback_requests.c.api_key.in_(keys),
        )
        built = built.where(or_(exists().where(whole, *called), exists().where(whole, *stated)))
    conditions = _said(query)
    if conditions:
        built = built.where(exists().where(whole, feedback.c.episode_id == part.c.id, *conditions))
    return built


def _said(query: Query) -> list[ColumnElement[bool]]:
    conditions = []
    if query.scored_since is not None:
        conditions.append(feedback.c.at >= query.scored_since)
    if query.scored_before is not None:
        conditions.append(feedback.c.at < query.scored_before)
    return conditions
