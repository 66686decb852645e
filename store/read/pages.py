"""Read what is stored page by page, oldest first, for lists that people and programs go through.

A page begins after the last item of the page before, by a key that never changes, and not at a
number of items to skip. So each item that was there when the first page was read comes exactly
once, whatever is stored meanwhile; only an episode that a join makes part of another in between
may be missed or have come already. `msgspec.json.encode` makes JSON of a page.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from msgspec import convert
from sqlalchemy import JSON, Row, Select, and_, func, literal, select, tuple_
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import BadPage
from store.read.episodes import matching
from store.records import Record, Split, UpdateRow
from store.schema.claimable import episode_policies
from store.schema.recorded import episodes
from store.schema.stated import feedback
from store.schema.trained import (
    KL_TO_BASE,
    MANIFEST_SHA256,
    PROBE_TOLERANCE,
    consumptions,
    policies,
    updates,
)
from store.tenants import bare, tenant_of
from store.versions import PolicyVersion

PAGE_SIZE: Final = 100
Item = TypeVar("Item")


class Page(Record, Generic[Item], frozen=True, kw_only=True):
    """Hold items of a list; the next page begins after `next` (None: there is no next page)."""

    items: tuple[Item, ...]
    next: str | None = None


class PolicyClaim(Record, frozen=True, kw_only=True):
    """Describe an episode as one policy sees it, of which a call is that policy's.

    `version` is the policy's version in the episode. `update_id` is the update that claimed it for
    the policy, if one did. Once that update has consumed it, `trained` says whether it was trained,
    and `reason` why not. `late_feedback` counts what was
    stated after the claim of an update that trained on it.
    """

    policy: str
    version: int
    update_id: UUID | None
    trained: bool | None
    reason: str | None
    late_feedback: int = 0


class EpisodeSummary(Record, frozen=True, kw_only=True):
    """Describe an episode without its calls; `store.read.lines` has the whole.

    `policy` and `policy_version` served its first call; `claims` has every policy, by name.
    `scored_at` is the time of its first reward, or of its newest reward for a single call.
    """

    id: UUID
    tenant: str
    key: str
    task: str | None
    method: str
    policy: str | None
    policy_version: int | None
    last_call_at: datetime
    scored_at: datetime | None
    quarantined_reason: str | None
    split: Split
    claims: tuple[PolicyClaim, ...]


_PART: Final = episodes.alias("part")
_LAST_CALL_OF_PARTS: Final = (
    select(func.max(_PART.c.last_call_at)).where(_PART.c.root == episodes.c.id).scalar_subquery()
)
_OF_SAME: Final = and_(
    consumptions.c.episode_id == episode_policies.c.episode_id,
    consumptions.c.policy == episode_policies.c.policy,
)
_LATE: Final = (
    select(func.count())
    .select_from(feedback.join(_PART, _PART.c.id == feedback.c.episode_id))
    .where(
        consumptions.c.trained,
        feedback.c.at > updates.c.claimed_at,
        (_PART.c.id == episode_policies.c.episode_id)
        | (_PART.c.root == episode_policies.c.episode_id),
    )
    .correlate(consumptions, updates, episode_policies)
    .scalar_subquery()
)
_CLAIM: Final = func.json_build_object(
    *("policy", episode_policies.c.policy),
    *("version", episode_policies.c.version),
    *("update_id", episode_policies.c.claimed_by),
    *("trained", consumptions.c.trained),
    *("reason", consumptions.c.reason),
    *("late_feedback", _LATE),
)
_CLAIMS: Final = (
    select(func.json_agg(aggregate_order_by(_CLAIM, episode_policies.c.policy), type_=JSON))
    .select_from(episode_policies)
    .outerjoin(consumptions, _OF_SAME)
    .outerjoin(updates, updates.c.id == consumptions.c.update_id)
    .where(episode_policies.c.episode_id == episodes.c.id)
    .correlate(episodes)
    .scalar_subquery()
)
_SUMMARY: Final = (
    episodes.c.id,
    episodes.c.key,
    func.coalesce(episodes.c.joined_task, episodes.c.task).label("task"),
    episodes.c.method,
    episodes.c.policy,
    episodes.c.policy_version,
    func.greatest(episodes.c.last_call_at, _LAST_CALL_OF_PARTS).label("last_call_at"),
    func.coalesce(episodes.c.scored_at, episodes.c.call_scored_at).label("scored_at"),
    episodes.c.quarantined_reason,
    func.coalesce(episodes.c.joined_split, episodes.c.split).label("split"),
    _CLAIMS.label("claims"),
)


async def episode_page(
    connection: AsyncConnection,
    *,
    after: str | None = None,
    limit: int = PAGE_SIZE,
    since: datetime | None = None,
    agent: str | None = None,
    policy: str | None = None,
    tenant: str | None = None,
) -> Page[EpisodeSummary]:
    """Read a page of episodes by id; the filters are those of `store.read.episodes.matching`.

    Args:
        connection: an open connection.
        after: `next` of the page before; None: the first page.
        limit: how many episodes a page has at most.
        since: only episodes with a call at or after this time.
        agent: only episodes with a call by this agent.
        policy: only episodes with a call to this policy.
        tenant: only episodes of this tenant.

    Raises:
        BadPage: `limit` is below 1, or `after` is not the `next` of a page.
    """
    query = (
        matching(since=since, agent=agent, policy=policy, tenant=tenant)
        .with_only_columns(*_SUMMARY)
        .order_by(None)
        .order_by(episodes.c.id)
    )
    if after is not None:
        query = query.where(episodes.c.id > _id_of(after))
    return await _page(connection, query, limit, _summary_of, lambda row: str(row.id))


async def version_page(
    connection: AsyncConnection,
    *,
    after: str | None = None,
    limit: int = PAGE_SIZE,
    policy: str | None = None,
) -> Page[PolicyVersion]:
    """Read a page of policy versions by name and number, asked for as a page of episodes is."""
    query = select(policies).order_by(policies.c.name, policies.c.version)
    if policy is not None:
        query = query.where(policies.c.name == policy)
    if after is not None:
        name, _, version = after.rpartition("@")
        if not (version.isascii() and version.isdecimal()):
            raise _no_next_of(after)
        last = tuple_(literal(name), literal(int(version)))
        query = query.where(tuple_(policies.c.name, policies.c.version) > last)
    return await _page(
        connection, query, limit, version_of, lambda row: f"{row.name}@{row.version}"
    )


async def update_page(
    connection: AsyncConnection,
    *,
    after: str | None = None,
    limit: int = PAGE_SIZE,
    policy: str | None = None,
) -> Page[UpdateRow]:
    """Read a page of updates by id, asked for as a page of episodes is."""
    query = select(updates).order_by(updates.c.id)
    if policy is not None:
        query = query.where(updates.c.policy == policy)
    if after is not None:
        query = query.where(updates.c.id > _id_of(after))
    return await _page(connection, query, limit, update_of, lambda row: str(row.id))


async def _page(
    connection: AsyncConnection,
    query: Select[Any],
    limit: int,
    item_of: Callable[[Row[Any]], Item],
    key_of: Callable[[Row[Any]], str],
) -> Page[Item]:
    if limit < 1:
        raise BadPage(f"limit is {limit}; a page has at least 1 item")
    # One more than the page holds: it tells whether there is a next page.
    rows: Sequence[Row[Any]] = (await connection.execute(query.limit(limit + 1))).all()
    shown = rows[:limit]
    more = key_of(shown[-1]) if len(rows) > limit else None
    return Page(items=tuple(map(item_of, shown)), next=more)


def _id_of(after: str) -> UUID:
    try:
        return UUID(after)
    except ValueError as error:
        raise _no_next_of(after) from error


def _no_next_of(after: str) -> BadPage:
    return BadPage(f"after is {after!r}; give the `next` of the page before, or None for the first")


def _summary_of(row: Row[Any]) -> EpisodeSummary:
    claims = convert(row.claims or (), tuple[PolicyClaim, ...])
    named = {
        "tenant": tenant_of(row.key),
        "key": bare(row.key),
        "task": row.task and bare(row.task),
    }
    return EpisodeSummary(**dict(row._mapping) | named | {"claims": claims})


def version_of(row: Row[Any]) -> PolicyVersion:
    """Return a row of `policies` as a record; what its update tells of it may not be in the row."""
    return PolicyVersion(
        name=row.name,
        version=row.version,
        state=row.state,
        served_name=row.served_name,
        adapter_path=row.adapter_path,
        update_id=row.update_id,
        files_deleted=row.files_deleted_at is not None,
        manifest_sha256=getattr(row, MANIFEST_SHA256, None),
        kl_to_base=getattr(row, KL_TO_BASE, None),
        probe_tolerance=getattr(row, PROBE_TOLERANCE, None),
        tenant=row.tenant,
        share=row.share,
        rolled_back=row.rolled_back_at is not None,
        ended=row.ended_at is not None,
    )


def update_of(row: Row[Any]) -> UpdateRow:
    """Return a row of `updates` as a record."""
    return UpdateRow(
        id=row.id,
        policy=row.policy,
        parent_version=row.parent_version,
        version=row.version,
        state=row.state,
        claimed_at=row.claimed_at,
        finished_at=row.finished_at,
        metrics=row.metrics,
    )
