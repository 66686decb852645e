"""Claim, release, consume: an episode is trained whole, and at most once (DESIGN §3.6).

A claim is an update in state `running` whose id stands in its episodes. It ends in one
transaction, either way: the update is `done`, its version recorded and its episodes
consumed; or it is `abandoned` and its episodes are free again. One update runs per policy
at a time (a unique index sees to it).
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import func, insert, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import ClaimLost
from store.ids import new_id
from store.policies import add_version
from store.reading import read_episodes
from store.records import Group, Record, UpdateRow
from store.tables import consumptions, episodes, updates


class ClaimRule(Record, frozen=True, kw_only=True):
    """When a group is complete, and when there are enough of them.

    `group_size` scored episodes make a group complete; one that has at least
    `smallest_group` is taken too once its first reward is `max_age_s` old. `groups` of
    them make an update; fewer will do once one has waited for `max_age_s`.
    """

    policy: str
    group_size: int
    groups: int
    smallest_group: int
    max_age_s: float


class Claim(Record, frozen=True, kw_only=True):
    """Whole groups, held for one update."""

    update_id: UUID
    parent_version: int
    groups: tuple[Group, ...]


class Outcome(Record, frozen=True, kw_only=True):
    """What became of one claimed episode: trained, or why not."""

    episode_id: UUID
    trained: bool
    reason: str | None = None


# The parts of another episode are claimed with it, and what is in doubt never.
_TASK = "COALESCE(joined_task, task)"
_READY = (
    f"policy = :policy AND {_TASK} IS NOT NULL AND scored_at IS NOT NULL"
    " AND claimed_by IS NULL AND root IS NULL AND quarantined_reason IS NULL"
)
_GROUPS = text(
    f"""
    SELECT {_TASK} AS task, count(*) AS members, extract(epoch FROM now() - min(scored_at)) AS age_s
    FROM episodes WHERE {_READY} GROUP BY 1
    HAVING count(*) >= :group_size
        OR (count(*) >= :smallest_group
            AND min(scored_at) < now() - make_interval(secs => :max_age_s))
    ORDER BY min(scored_at), 1 LIMIT :groups
    """
)
# Whoever holds a member is waited for (in the order of keys, as everywhere): a group that is
# claimed without it would not be whole.
_MEMBERS = text(
    f"""
    SELECT id, {_TASK} AS task, scored_at FROM episodes WHERE {_READY} AND {_TASK} = ANY(:tasks)
    ORDER BY key FOR UPDATE
    """
)


async def claim(
    connection: AsyncConnection,
    rule: ClaimRule,
    parent_version: int,
    recipe: Mapping[str, Any],
) -> Claim | None:
    """Take the oldest complete groups for a new update; None while there are too few.

    The same ledger gives the same claim.

    Raises:
        ClaimLost: another update of the policy runs.
    """
    found = (await connection.execute(_GROUPS, _parameters(rule))).all()
    waited = any(row.age_s >= rule.max_age_s for row in found)
    if not found or (len(found) < rule.groups and not waited):
        return None
    tasks = [row.task for row in found]
    rows = await connection.execute(_MEMBERS, {"policy": rule.policy, "tasks": tasks})
    members: dict[str, list[UUID]] = {task: [] for task in tasks}
    for row in sorted(rows, key=lambda row: (row.scored_at, row.id)):
        if len(members[row.task]) < rule.group_size:
            members[row.task].append(row.id)
    taken = {task: ids for task, ids in members.items() if len(ids) >= rule.smallest_group}
    if not taken:
        return None
    update_id = await _start_update(connection, rule.policy, parent_version, recipe)
    await connection.execute(
        update(episodes)
        .where(episodes.c.id.in_([episode for ids in taken.values() for episode in ids]))
        .values(claimed_by=update_id)
    )
    return await load_claim(connection, update_id)


def _parameters(rule: ClaimRule) -> dict[str, Any]:
    return {
        "policy": rule.policy,
        "group_size": rule.group_size,
        "smallest_group": rule.smallest_group,
        "max_age_s": rule.max_age_s,
        "groups": rule.groups,
    }


async def _start_update(
    connection: AsyncConnection, policy: str, parent_version: int, recipe: Mapping[str, Any]
) -> UUID:
    update_id = new_id()
    started = await connection.execute(
        postgresql.insert(updates)
        .values(
            id=update_id,
            policy=policy,
            parent_version=parent_version,
            state="running",
            recipe=dict(recipe),
        )
        .on_conflict_do_nothing()
        .returning(updates.c.id)
    )
    if started.first() is None:
        raise ClaimLost(f"another update of policy {policy} runs")
    return update_id


async def load_claim(connection: AsyncConnection, update_id: UUID) -> Claim:
    """The episodes that an update holds, as groups in a stable order."""
    head = (await connection.execute(select(updates).where(updates.c.id == update_id))).one()
    held = (
        select(episodes.c.id)
        .where(episodes.c.claimed_by == update_id)
        .order_by(func.coalesce(episodes.c.joined_task, episodes.c.task), episodes.c.first_call_id)
    )
    ids = list((await connection.execute(held)).scalars())
    by_task: dict[str, list[Any]] = {}
    for episode in await read_episodes(connection, ids):
        by_task.setdefault(episode.task or "", []).append(episode)
    groups = tuple(Group(task=task, episodes=tuple(them)) for task, them in by_task.items())
    return Claim(update_id=update_id, parent_version=head.parent_version, groups=groups)


async def running_update(connection: AsyncConnection, policy: str) -> UUID | None:
    """The update of `policy` that was begun and not ended, if there is one."""
    query = select(updates.c.id).where(updates.c.policy == policy, updates.c.state == "running")
    return (await connection.execute(query)).scalar()


async def release(connection: AsyncConnection, update_id: UUID, why: str) -> int:
    """Give a running update's episodes back; returns how many.

    Those of one that has ended meanwhile are spent, and stay so.
    """
    ended = await connection.execute(
        update(updates)
        .where(updates.c.id == update_id, updates.c.state == "running")
        .values(state="abandoned", finished_at=text("now()"), metrics={"abandoned": why})
        .returning(updates.c.id)
    )
    if ended.first() is None:
        return 0
    freed = await connection.execute(
        update(episodes).where(episodes.c.claimed_by == update_id).values(claimed_by=None)
    )
    return int(freed.rowcount)


async def consume(
    connection: AsyncConnection,
    update_id: UUID,
    outcomes: Sequence[Outcome],
    metrics: Mapping[str, Any],
    *,
    policy: str,
    version: int | None,
    adapter_path: str | None,
) -> None:
    """Record a finished update: its episodes are spent, its version exists.

    `version` is None where nothing was trained (no signal in any group).

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
    """
    ended = await connection.execute(
        update(updates)
        .where(updates.c.id == update_id, updates.c.state == "running")
        .values(state="done", version=version, metrics=dict(metrics), finished_at=text("now()"))
        .returning(updates.c.id)
    )
    if ended.first() is None:
        raise ClaimLost(f"update {update_id} is no longer running")
    await connection.execute(
        insert(consumptions),
        [
            {
                "episode_id": outcome.episode_id,
                "update_id": update_id,
                "trained": outcome.trained,
                "reason": outcome.reason,
            }
            for outcome in outcomes
        ],
    )
    if version is not None and adapter_path is not None:
        await add_version(connection, policy, version, adapter_path, update_id)


async def next_version(connection: AsyncConnection, policy: str) -> int:
    """The number of the version to be made next: never one that was recorded before."""
    highest = await connection.scalar(
        text("SELECT coalesce(max(version), 0) FROM policies WHERE name = :policy"),
        {"policy": policy},
    )
    return int(highest) + 1


async def list_updates(connection: AsyncConnection, policy: str | None = None) -> list[UpdateRow]:
    """Updates in the order of their claims."""
    query = select(updates).order_by(updates.c.claimed_at, updates.c.id)
    if policy is not None:
        query = query.where(updates.c.policy == policy)
    return [
        UpdateRow(
            id=row.id,
            policy=row.policy,
            parent_version=row.parent_version,
            version=row.version,
            state=row.state,
            claimed_at=row.claimed_at,
            finished_at=row.finished_at,
            metrics=row.metrics,
        )
        for row in await connection.execute(query)
    ]


async def hold_policy(connection: AsyncConnection, policy: str) -> bool:
    """Whether this connection is the one that trains `policy`, for as long as it lives."""
    query = text("SELECT pg_try_advisory_lock(hashtext(:name))")
    held = await connection.scalar(query, {"name": f"pawl-trainer:{policy}"})
    await connection.commit()
    return bool(held)


async def still_connected(connection: AsyncConnection) -> None:
    """Raise (see `store.away`) if the connection, and with it the policy, is lost."""
    await connection.execute(text("SELECT 1"))
    await connection.commit()
