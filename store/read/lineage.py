"""Read a policy's versions with their rewards, and the updates that made them.

Lists are paged by a key. If there are very many episodes, only the newest are counted.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claims import IMPORTED_FROM
from store.ids import lowest_id_at
from store.read.evaluations import Rewards, mean_rewards_sql, rewards_from_row
from store.records import EVAL
from store.schema.tables import CONTROL, KL_TO_BASE, LIVE, SPLIT, policy_events
from store.versions import VERSION_COLUMNS, PolicyEvent

# Most policies that one page lists, and the number of newest episodes whose rewards it counts.
MOST_POLICIES: Final = 200
MOST_EPISODES: Final = 100_000
# Most episodes of one update that a page lists.
MOST_MEMBERS: Final = 1000

_POLICIES: Final = text(
    """
    SELECT name, frozen_at FROM policies
    WHERE version = 0 AND (CAST(:tenant AS text) IS NULL OR tenant = :tenant)
    ORDER BY name IS DISTINCT FROM CAST(:first AS text), name LIMIT :most
    """
)
_VERSION: Final = f"""
    SELECT {VERSION_COLUMNS}, p.frozen_at, p.created_at, p.changed_at,
        metrics->>'{IMPORTED_FROM}' AS imported_from,
        CASE WHEN metrics->>'{IMPORTED_FROM}' IS NULL THEN parent_version END AS parent,
        CAST(metrics->>'{KL_TO_BASE}' AS double precision) AS kl_to_base
    FROM policies p
    LEFT JOIN (SELECT id AS by_id, parent_version, metrics FROM updates) u ON by_id = p.update_id
    WHERE p.name = :policy
"""
# The first page also has the versions that new episodes get or may soon get, however old they are.
_LINE: Final = text(
    f"""
    ({_VERSION} AND (CAST(:before AS integer) IS NULL OR p.version < :before)
        ORDER BY p.version DESC LIMIT :most)
    UNION
    ({_VERSION} AND CAST(:before AS integer) IS NULL AND {LIVE}
        AND (state IN ('serving', 'canary', 'loaded') OR {CONTROL}))
    ORDER BY version DESC
    """
)
_LIVE_AND_GIVEN: Final = text(
    f"""
    {_VERSION} AND (version = 0 OR {LIVE} OR version = ANY(CAST(:versions AS integer[])))
    ORDER BY version DESC
    """
)
# An episode belongs to the oldest version that served a call of it.
_REWARDS: Final = text(
    f"""
    WITH newest AS (
        SELECT episode_id, version, task, reward, claimable, claimed_by FROM episode_policies
        WHERE policy = :policy AND episode_id >= :first
            AND version = ANY(CAST(:versions AS integer[]))
        ORDER BY episode_id DESC LIMIT :most),
    counted AS (
        SELECT n.version, n.claimable, n.episode_id AS id, n.task, n.reward
        FROM newest n LEFT JOIN episodes e ON e.id = n.episode_id AND NOT n.claimable
        WHERE n.claimable OR {SPLIT} = '{EVAL}' AND e.root IS NULL
            AND e.quarantined_reason IS NULL AND e.deleted_at IS NULL AND n.claimed_by IS NULL)
    {mean_rewards_sql("counted", "version, claimable")}
    """
)


# Rewarded episodes that are compared: the newest of trained versions, the first of version 0.
MOST_COMPARED: Final = 500
_SINCE_BASE: Final = text(
    f"""
    WITH ends AS (
        SELECT s.name AS policy, one.* FROM policies s CROSS JOIN LATERAL (
            (SELECT true AS is_new, episode_id AS id, task, reward FROM episode_policies
             WHERE policy = s.name AND version BETWEEN 1 AND s.version AND claimable
                AND reward IS NOT NULL ORDER BY episode_id DESC LIMIT {MOST_COMPARED})
            UNION ALL (SELECT false, id, task, reward FROM (
                SELECT episode_id AS id, version, task, reward FROM episode_policies
                WHERE policy = s.name AND claimable AND reward IS NOT NULL
                ORDER BY episode_id LIMIT 40 * {MOST_COMPARED}) first
             WHERE version = 0 LIMIT {MOST_COMPARED})) one
        WHERE s.state = 'serving' AND s.version > 0
            AND (CAST(:tenant AS text) IS NULL OR s.tenant = :tenant))
    {mean_rewards_sql("ends", "policy, is_new")}
    """
)


async def policies_of(
    connection: AsyncConnection, tenant: str | None, first: str | None
) -> Sequence[Row[Any]]:
    """Return `name` and `frozen_at` of a tenant's policies (None: of all), at most MOST_POLICIES.

    The policy `first` comes first, if there is one; the others follow by name.
    """
    values = {"tenant": tenant, "first": first, "most": MOST_POLICIES}
    return (await connection.execute(_POLICIES, values)).all()


async def versions_in_line(
    connection: AsyncConnection, policy: str, before: int | None, most: int
) -> Sequence[Row[Any]]:
    """Return at most `most` versions of a policy, the newest first, numbered below `before`.

    Without `before`, the versions that new episodes get, or may soon get, are added. A row has
    columns of `policies`, the `kl_to_base` of its update, and as `parent` the version that it was
    trained from: None for the base model, and for an adapter that was `imported_from` a folder.
    """
    values = {"policy": policy, "before": before, "most": most}
    return (await connection.execute(_LINE, values)).all()


async def live_and_given_versions(
    connection: AsyncConnection, policy: str, versions: Collection[int]
) -> dict[int, Row[Any]]:
    """Return rows as `versions_in_line` does: of live versions, version 0, and `versions`."""
    values = {"policy": policy, "versions": list(versions)}
    return {row.version: row for row in await connection.execute(_LIVE_AND_GIVEN, values)}


async def rewards_of(
    connection: AsyncConnection, policy: str, versions: Collection[int], since: datetime | None
) -> tuple[dict[int, Rewards], dict[int, Rewards]]:
    """Return rewards by version: first of claimable episodes, then of the split `eval`.

    Of the episodes that began at `since` or later (None: all), the newest `MOST_EPISODES` count.
    """
    values = {
        "policy": policy,
        "first": UUID(int=0) if since is None else lowest_id_at(since),
        "versions": list(versions),
        "most": MOST_EPISODES,
    }
    rows = (await connection.execute(_REWARDS, values)).all()
    live = {row.version: rewards_from_row(row) for row in rows if row.claimable}
    return live, {row.version: rewards_from_row(row) for row in rows if not row.claimable}


async def rewards_since_base(
    connection: AsyncConnection, tenant: str | None
) -> dict[str, tuple[Rewards, Rewards]]:
    """Return, by policy, the newest rewards of trained versions, and the base model's first.

    The policies are those of `tenant` (None: all). A policy is left out if its base model serves,
    or if one of the two has no rewards. Versions above the serving one do not count.
    """
    ends: dict[str, dict[bool, Rewards]] = {}
    for row in await connection.execute(_SINCE_BASE, {"tenant": tenant}):
        ends.setdefault(row.policy, {})[row.is_new] = rewards_from_row(row)
    return {policy: (own[True], own[False]) for policy, own in ends.items() if len(own) == 2}


async def newest_events(
    connection: AsyncConnection, policy: str, versions: Collection[int]
) -> dict[int, PolicyEvent]:
    """Return the newest event of each of these versions, except events to state `written`."""
    own = policy_events.c
    query = (
        select(policy_events)
        .distinct(own.version)
        .where(own.name == policy, own.version.in_(versions), own.to_state != "written")
        .order_by(own.version, own.id.desc())
    )
    rows = await connection.execute(query)
    return {row.version: PolicyEvent(**row._mapping) for row in rows}


# Updates

_UPDATE: Final = """
    SELECT u.id, u.policy, u.parent_version, u.version, u.state, u.claimed_at, u.finished_at,
        u.metrics - CAST(:hidden AS text[]) || jsonb_build_object('seconds',
            extract(epoch FROM u.finished_at - u.claimed_at)) AS metrics, {more}
        (SELECT COALESCE(jsonb_object_agg(outcome, episodes), '{{}}') FROM (
            SELECT COALESCE(reason, 'trained') AS outcome, count(*) AS episodes FROM consumptions
            WHERE update_id = u.id GROUP BY 1) counted) AS outcomes
    FROM updates u
"""
_UPDATES: Final = text(
    f"""
    {_UPDATE.format(more="")}
    WHERE u.policy = :policy AND (u.claimed_at, u.id) < (
        COALESCE((SELECT claimed_at FROM updates WHERE id = :before), 'infinity'),
        CAST(:before AS uuid))
    ORDER BY u.claimed_at DESC, u.id DESC LIMIT :most
    """
)
_ONE_UPDATE: Final = text(
    f"""
    {_UPDATE.format(more="u.recipe,")}
    WHERE u.id = :id AND EXISTS (SELECT FROM policies p WHERE p.name = u.policy AND p.version = 0
        AND (CAST(:tenant AS text) IS NULL OR p.tenant = :tenant))
    """
)
# Episodes that a retraining freed are still listed.
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


async def updates_of(
    connection: AsyncConnection,
    policy: str,
    before: UUID | None,
    most: int,
    hidden: Collection[str],
) -> Sequence[Row[Any]]:
    """Return at most `most` updates of a policy, the newest first, claimed before `before`.

    A row has columns of `updates`, and as `outcomes` how many episodes the update consumed, by
    `trained` or the reason why not. The metrics named in `hidden` are left out, and the `seconds`
    from claim to end are added.
    """
    values = {"policy": policy, "before": before, "most": most, "hidden": list(hidden)}
    return (await connection.execute(_UPDATES, values)).all()


async def read_update(
    connection: AsyncConnection, update_id: UUID, tenant: str | None, hidden: Collection[str]
) -> Row[Any] | None:
    """Return an update as `updates_of` does, with its recipe.

    None: there is no such update, or its policy is another tenant's (`tenant` None: any).
    """
    values = {"id": update_id, "tenant": tenant, "hidden": list(hidden)}
    return (await connection.execute(_ONE_UPDATE, values)).first()


async def episodes_of_update(connection: AsyncConnection, update_id: UUID) -> Sequence[Row[Any]]:
    """Return the episodes of an update, sorted by task as stored; at most MOST_MEMBERS.

    `trained` is None while the update runs; `freed` says whether a retraining freed the episode.
    """
    return (await connection.execute(_MEMBERS, {"id": update_id})).all()
