"""Read a policy's line of versions, with what each came to, and the updates that made them.

Lists go on from a key. What is counted of episodes is bounded: of the newest ones alone where there
are very many.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claims import IMPORTED_FROM
from store.ids import lowest_id_at
from store.records import EVAL, Record, UpdateRow
from store.schema.tables import CONTROL, KL_TO_BASE, LIVE, SPLIT, THROUGHPUT
from store.values.intervals import student, wilson
from store.versions import VERSION_COLUMNS, PolicyState, PolicyVersion, version_of

# Most policies that one page names, and most episodes whose rewards it counts, the newest.
MOST_POLICIES: Final = 200
MOST_EPISODES: Final = 100_000
# Most episodes of one update that a page lists.
MOST_MEMBERS: Final = 1000

_POLICIES: Final = text(
    """
    SELECT name, frozen_at FROM policies
    WHERE version = 0 AND (CAST(:tenant AS text) IS NULL OR tenant = :tenant)
    ORDER BY name LIMIT :most
    """
)
_NODE: Final = f"""
    SELECT {VERSION_COLUMNS}, p.created_at, p.changed_at, p.gate, u.parent_version,
        u.metrics->>'{IMPORTED_FROM}' AS imported_from,
        CAST(u.metrics->>'{KL_TO_BASE}' AS double precision) AS kl_to_base
    FROM policies p
    LEFT JOIN (SELECT id AS by_id, parent_version, metrics FROM updates) u ON by_id = p.update_id
    WHERE p.name = :policy
"""
# Those that new episodes begin with are on the first page, however old they are.
_LINE: Final = text(
    f"""
    ({_NODE} AND (CAST(:before AS integer) IS NULL OR p.version < :before)
        ORDER BY p.version DESC LIMIT :most)
    UNION
    ({_NODE} AND CAST(:before AS integer) IS NULL AND {LIVE}
        AND (state IN ('serving', 'canary', 'loaded') OR {CONTROL}))
    ORDER BY version DESC
    """
)
_ONE: Final = text(f"{_NODE} AND p.version = :version")
_CHILDREN: Final = text(
    """
    SELECT version FROM updates
    WHERE policy = :policy AND parent_version = :version AND version IS NOT NULL
    ORDER BY version DESC LIMIT 50
    """
)
# An episode belongs to the oldest version that served a call of it.
_REWARDS: Final = text(
    f"""
    WITH newest AS (
        SELECT episode_id, version, reward, claimable, claimed_by FROM episode_policies
        WHERE policy = :policy AND episode_id >= :first
            AND version = ANY(CAST(:versions AS integer[]))
        ORDER BY episode_id DESC LIMIT :most)
    SELECT n.version, n.claimable, count(*) AS episodes, count(n.reward) AS scored,
        avg(n.reward) AS mean, stddev_samp(n.reward) AS spread,
        COALESCE(bool_and(n.reward IN (0, 1)), false) AS zero_or_one
    FROM newest n LEFT JOIN episodes e ON e.id = n.episode_id AND NOT n.claimable
    WHERE n.claimable OR {SPLIT} = '{EVAL}' AND e.root IS NULL
        AND e.quarantined_reason IS NULL AND e.deleted_at IS NULL AND n.claimed_by IS NULL
    GROUP BY n.version, n.claimable
    """
)
_DECIDED: Final = text(
    """
    SELECT DISTINCT ON (version) version, reason, actor, evidence->>'verdict' AS verdict, at
    FROM policy_events WHERE name = :policy AND version = ANY(CAST(:versions AS integer[]))
        AND to_state <> 'written'
    ORDER BY version, id DESC
    """
)
_STANDINGS: Final = text(
    f"""
    SELECT version, served_name, state, share, unloaded_at IS NOT NULL AS unloaded,
        ended_at IS NOT NULL AS ended, frozen_at IS NOT NULL AS frozen
    FROM policies WHERE name = :policy
        AND (version = 0 OR {LIVE} OR version = ANY(CAST(:versions AS integer[])))
    ORDER BY version
    """
)


class PolicyName(Record, frozen=True):
    """Name a policy; `frozen_at` is since when only people move its traffic, or None."""

    name: str
    frozen_at: datetime | None


class Rewards(Record, frozen=True, kw_only=True):
    """Count episodes; the mean of the `scored` ones lies in a 95 % interval, if it has one."""

    episodes: int = 0
    scored: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None


class Node(Record, frozen=True, kw_only=True):
    """Describe a version in its policy's line.

    `parent` is the version that it was trained from, None for the base model and what was imported.
    `since` is when it got its state; `gate` is the rule that it is judged by, once it is loaded.
    """

    version: PolicyVersion
    parent: int | None
    imported_from: str | None
    created_at: datetime
    since: datetime
    gate: Mapping[str, Any] | None


class Decided(Record, frozen=True, kw_only=True):
    """Say why a version has its state, by its newest event; `verdict` is the gate's, if any."""

    version: int
    reason: str
    actor: str
    verdict: str | None
    at: datetime


class Place(Record, frozen=True, kw_only=True):
    """Say where a version stands; `frozen` is of version 0."""

    version: int
    served_name: str
    state: PolicyState
    share: float | None
    unloaded: bool
    ended: bool
    frozen: bool


async def policies_of_tenant(connection: AsyncConnection, tenant: str | None) -> list[PolicyName]:
    """Return the policies of a tenant (None: of all) by name; at most MOST_POLICIES."""
    rows = await connection.execute(_POLICIES, {"tenant": tenant, "most": MOST_POLICIES})
    return [PolicyName(row.name, row.frozen_at) for row in rows]


def _node(row: Any) -> Node:
    return Node(
        version=version_of(row),
        parent=None if row.imported_from else row.parent_version,
        imported_from=row.imported_from,
        created_at=row.created_at,
        since=row.changed_at,
        gate=row.gate,
    )


async def line_of(
    connection: AsyncConnection, policy: str, before: int | None, most: int
) -> list[Node]:
    """Return at most `most` versions of a policy, the newest first, numbered below `before`.

    Without `before` they are followed by those that new episodes begin with, or may soon.
    """
    values = {"policy": policy, "before": before, "most": most}
    return [_node(row) for row in await connection.execute(_LINE, values)]


async def one_version(connection: AsyncConnection, policy: str, version: int) -> Node | None:
    """Return one version of a policy, or None if there is none of that number."""
    row = (await connection.execute(_ONE, {"policy": policy, "version": version})).first()
    return None if row is None else _node(row)


async def children_of(connection: AsyncConnection, policy: str, version: int) -> list[int]:
    """Return the versions that were trained from one, the newest first; at most 50."""
    values = {"policy": policy, "version": version}
    return list((await connection.execute(_CHILDREN, values)).scalars())


async def rewards_of(
    connection: AsyncConnection, policy: str, versions: Collection[int], since: datetime | None
) -> tuple[dict[int, Rewards], dict[int, Rewards]]:
    """Return by version what episodes came to: live ones, and those of evaluation.

    Only episodes that began at `since` or later count (None: all).
    """
    values = {
        "policy": policy,
        "first": UUID(int=0) if since is None else lowest_id_at(since),
        "versions": list(versions),
        "most": MOST_EPISODES,
    }
    live: dict[int, Rewards] = {}
    held_out: dict[int, Rewards] = {}
    for row in await connection.execute(_REWARDS, values):
        interval = None
        if row.mean is not None:
            is_share = row.zero_or_one
            interval = (
                wilson(row.mean, row.scored)
                if is_share
                else student(row.mean, row.spread or 0.0, row.scored)
            )
        low, high = interval or (None, None)
        (live if row.claimable else held_out)[row.version] = Rewards(
            episodes=row.episodes, scored=row.scored, mean=row.mean, low=low, high=high
        )
    return live, held_out


async def why_decided(
    connection: AsyncConnection, policy: str, versions: Collection[int]
) -> dict[int, Decided]:
    """Return why each of these versions has its state, without those that are just written."""
    values = {"policy": policy, "versions": list(versions)}
    rows = await connection.execute(_DECIDED, values)
    return {row.version: Decided(**row._mapping) for row in rows}


async def places_of(
    connection: AsyncConnection, policy: str, versions: Collection[int]
) -> dict[int, Place]:
    """Return where the versions stand that servers have, or will have, and these `versions`."""
    values = {"policy": policy, "versions": list(versions)}
    rows = await connection.execute(_STANDINGS, values)
    return {row.version: Place(**row._mapping) for row in rows}


# Updates

# The figures of an update that a list of them has.
FIGURES: Final = (
    *("loss", "reward_mean", KL_TO_BASE, "drift_kl", "effective_sample_size", "clip_share"),
    *("ratio_cut_share", "masked_share", "train_seconds", "episodes", "trained_episodes"),
    *(*THROUGHPUT, "abandoned", IMPORTED_FROM),
)
_SHORT: Final = ", ".join(f"'{name}', metrics->'{name}'" for name in FIGURES)
_UPDATE: Final = """
    SELECT id, policy, parent_version, version, state, claimed_at, finished_at,
        {metrics} AS metrics, before IS NOT NULL AND before <> recipe AS other_recipe
    FROM (SELECT *, lag(recipe) OVER (ORDER BY claimed_at, id) AS before FROM (
        SELECT * FROM updates WHERE policy = :policy AND {which}
        ORDER BY claimed_at DESC, id DESC LIMIT :most + 1) newest) compared
    ORDER BY claimed_at DESC, id DESC LIMIT :most
"""
_FIGURES_OF: Final = f"jsonb_strip_nulls(jsonb_build_object({_SHORT}))"
_UPDATES: Final = text(_UPDATE.format(metrics=_FIGURES_OF, which="true"))
_UPDATES_BEFORE: Final = text(
    _UPDATE.format(
        metrics=_FIGURES_OF,
        which="(claimed_at, id) < (SELECT claimed_at, id FROM updates WHERE id = :before)",
    )
)
_CAME_TO: Final = text(
    """
    SELECT update_id, COALESCE(reason, 'trained') AS reason, count(*) AS episodes
    FROM consumptions WHERE update_id = ANY(CAST(:updates AS uuid[])) GROUP BY 1, 2
    """
)
_RECIPES: Final = text(
    """
    SELECT u.policy, u.recipe, b.recipe AS before FROM updates u
    LEFT JOIN LATERAL (SELECT recipe FROM updates o WHERE o.policy = u.policy
        AND (o.claimed_at, o.id) < (u.claimed_at, u.id)
        ORDER BY o.claimed_at DESC, o.id DESC LIMIT 1) b ON true
    WHERE u.id = :id AND EXISTS (SELECT FROM policies p WHERE p.name = u.policy AND p.version = 0
        AND (CAST(:tenant AS text) IS NULL OR p.tenant = :tenant))
    """
)
# What a retraining freed is still told of.
_MEMBERS: Final = text(
    f"""
    SELECT m.episode_id, COALESCE(e.joined_task, e.task) AS task, p.reward, p.version, m.trained,
        m.reason, m.freed, e.deleted_at IS NOT NULL AS deleted
    FROM (SELECT episode_id, policy, trained, reason, false AS freed FROM consumptions
            WHERE update_id = :id
        UNION ALL SELECT episode_id, policy, trained, reason, true FROM freed_consumptions
            WHERE update_id = :id
        UNION ALL SELECT episode_id, policy, NULL, NULL, false FROM episode_policies h
            WHERE claimed_by = :id AND NOT EXISTS (SELECT FROM consumptions c
                WHERE (c.episode_id, c.policy) = (h.episode_id, h.policy))) m
    JOIN episodes e ON e.id = m.episode_id
    LEFT JOIN episode_policies p ON (p.episode_id, p.policy) = (m.episode_id, m.policy)
    ORDER BY task NULLS LAST, e.first_call_id LIMIT {MOST_MEMBERS}
    """
)


class UpdateFigures(UpdateRow, frozen=True, kw_only=True):
    """Describe an update, in a list with FIGURES alone.

    `other_recipe` says that the recipe is not that of the policy's update before.
    """

    other_recipe: bool


class Member(Record, frozen=True, kw_only=True):
    """Describe an episode of an update, its task as it is kept; `trained` is None while it runs."""

    episode_id: UUID
    task: str | None
    reward: float | None
    version: int | None
    trained: bool | None
    reason: str | None
    freed: bool
    deleted: bool


async def updates_of(
    connection: AsyncConnection, policy: str, before: UUID | None, most: int
) -> list[UpdateFigures]:
    """Return at most `most` updates of a policy, the newest first, claimed before `before`."""
    values = {"policy": policy, "most": most} | ({} if before is None else {"before": before})
    query = _UPDATES if before is None else _UPDATES_BEFORE
    return [UpdateFigures(**row._mapping) for row in await connection.execute(query, values)]


async def one_update(
    connection: AsyncConnection, update_id: UUID, tenant: str | None
) -> tuple[UpdateFigures, Mapping[str, Any], Mapping[str, Any] | None] | None:
    """Return an update, its recipe, and that of the policy's update before, if there was one.

    None: there is no such update, or its policy is not the tenant's (None: anybody's).
    """
    row = (await connection.execute(_RECIPES, {"id": update_id, "tenant": tenant})).first()
    if row is None:
        return None
    query = text(_UPDATE.format(metrics="metrics", which="id = :id"))
    values = {"policy": row.policy, "most": 1, "id": update_id}
    [found] = (await connection.execute(query, values)).all()
    is_other = row.before is not None and row.before != row.recipe
    figures = UpdateFigures(**{**found._mapping, "other_recipe": is_other})
    return figures, row.recipe, row.before


async def outcomes_of(
    connection: AsyncConnection, updates: Collection[UUID]
) -> dict[UUID, dict[str, int]]:
    """Count the episodes that updates consumed: `trained`, or by why they were not."""
    found: dict[UUID, dict[str, int]] = {}
    for row in await connection.execute(_CAME_TO, {"updates": list(updates)}):
        found.setdefault(row.update_id, {})[row.reason] = row.episodes
    return found


async def members_of(connection: AsyncConnection, update_id: UUID) -> list[Member]:
    """Return the episodes of an update by task, at most MOST_MEMBERS."""
    rows = await connection.execute(_MEMBERS, {"id": update_id})
    return [Member(**row._mapping) for row in rows]
