"""Claim, release, consume: an episode is trained whole, and at most once (DESIGN §3.6).

A claim is an update in state `running` whose id stands in its episodes. It ends in one
transaction, either way: the update is `done`, its version recorded and its episodes
consumed; or it is `abandoned` and its episodes are free again. One update runs per policy
at a time (a unique index sees to it).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import func, insert, null, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import ClaimLost
from store.expiry import oldest_version
from store.ids import new_id
from store.policies import add_version
from store.reading import read_episodes
from store.ready import EARLIER_MEMBERS, ClaimRule, find_ready
from store.records import Episode, Group, Record, UpdateRow
from store.tables import consumptions, episodes, updates


class Claim(Record, frozen=True, kw_only=True):
    """Whole groups, held for one update, and all else that their credit depends on.

    Episodes with a call from before `oldest_version` are stale. `baselines` is what the
    policy's last update left of its moving baselines, as JSON; None before the first.
    `policy` is the one in training: episodes may have calls of others, too.
    """

    update_id: UUID
    policy: str
    parent_version: int
    groups: tuple[Group, ...]
    oldest_version: int = 0
    baselines: Mapping[str, Any] | None = None


class Outcome(Record, frozen=True, kw_only=True):
    """What became of one claimed episode: trained, or why not."""

    episode_id: UUID
    trained: bool
    reason: str | None = None


async def claim(
    connection: AsyncConnection,
    rule: ClaimRule,
    parent_version: int,
    recipe: Mapping[str, Any],
) -> UUID | None:
    """Take the freshest complete groups for a new update; None while there are too few.

    The same ledger gives the same claim. Returns the update's id; `load_claim` reads what it
    holds, after this transaction: whoever stores calls or feedback of these episodes waits
    for nothing but their marking.

    Raises:
        ClaimLost: another update of the policy runs.
    """
    oldest = await oldest_version(connection, rule.policy, parent_version, rule.max_staleness)
    taken = await find_ready(connection, rule, oldest)
    if not taken:
        return None
    update_id = new_id()
    started = await connection.execute(
        postgresql.insert(updates)
        .values(
            id=update_id,
            policy=rule.policy,
            parent_version=parent_version,
            group_size=rule.group_size,
            oldest_version=oldest,
            state="running",
            recipe=dict(recipe),
        )
        .on_conflict_do_nothing()
        .returning(updates.c.id)
    )
    if started.first() is None:
        raise ClaimLost(f"another update of policy {rule.policy} runs")
    await connection.execute(
        update(episodes).where(episodes.c.id.in_(taken)).values(claimed_by=update_id)
    )
    return update_id


async def load_claim(connection: AsyncConnection, update_id: UUID) -> Claim:
    """What an update holds, or has held: its groups in a stable order.

    Those that are short are filled up with members that earlier updates consumed.

    Raises:
        Damaged: a call cannot be read back.
    """
    head = (await connection.execute(select(updates).where(updates.c.id == update_id))).one()
    task_of = await _held(connection, update_id)
    earlier_of = await _earlier(connection, head, Counter(task_of.values()))
    ids = [*task_of, *(one for them in earlier_of.values() for one in them)]
    read = {episode.id: episode for episode in await read_episodes(connection, ids)}
    by_task: dict[str, list[Episode]] = {}
    for one, task in task_of.items():
        by_task.setdefault(task, []).append(read[one])
    groups = tuple(
        Group(
            task=task,
            episodes=tuple(them),
            earlier=tuple(read[one] for one in earlier_of.get(task, ())),
        )
        for task, them in by_task.items()
    )
    return Claim(
        update_id=update_id,
        policy=head.policy,
        parent_version=head.parent_version,
        groups=groups,
        oldest_version=head.oldest_version,
        baselines=await _baselines_before(connection, head),
    )


async def _held(connection: AsyncConnection, update_id: UUID) -> dict[UUID, str]:
    """The episodes of an update with their tasks; "" where an episode has none."""
    task = func.coalesce(episodes.c.joined_task, episodes.c.task, "")
    query = (
        select(episodes.c.id, task)
        .where(episodes.c.claimed_by == update_id)
        .order_by(task, episodes.c.first_call_id)
    )
    return {row[0]: row[1] for row in await connection.execute(query)}


async def _earlier(
    connection: AsyncConnection, head: Any, sizes: Mapping[str, int]
) -> dict[str, list[UUID]]:
    """Of each task that is short of members the newest that were consumed before."""
    full = head.group_size
    short = {task: full - size for task, size in sizes.items() if task and size < full}
    if not short:
        return {}
    values = {"policy": head.policy, "before": head.claimed_at, "oldest": head.oldest_version}
    found: dict[str, list[UUID]] = {}
    for row in await connection.execute(EARLIER_MEMBERS, values | {"tasks": list(short)}):
        them = found.setdefault(row.task, [])
        if len(them) < short[row.task]:
            them.append(row.id)
    return found


async def _baselines_before(connection: AsyncConnection, head: Any) -> Mapping[str, Any] | None:
    query = (
        select(updates.c.baselines)
        .where(
            updates.c.policy == head.policy,
            updates.c.state == "done",
            updates.c.baselines.is_not(None),
            updates.c.claimed_at < head.claimed_at,
        )
        .order_by(updates.c.claimed_at.desc())
        .limit(1)
    )
    found: Mapping[str, Any] | None = (await connection.execute(query)).scalar()
    return found


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
    baselines: Mapping[str, Any] | None = None,
) -> None:
    """Record a finished update: its episodes are spent, its version exists.

    `version` is None where nothing was trained (no signal in any group). `baselines` is
    what the next update's moving baselines start from.

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
    """
    ended = await connection.execute(
        update(updates)
        .where(updates.c.id == update_id, updates.c.state == "running")
        .values(
            state="done",
            version=version,
            metrics=dict(metrics),
            baselines=null() if baselines is None else dict(baselines),
            finished_at=text("now()"),
        )
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
