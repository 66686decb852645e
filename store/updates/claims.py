"""Claim, release and consume episodes, so that each is trained whole and at most once.

A claim is an update in state `running` whose id is in the `claimed_by` column of what its policy
may claim of its episodes (`episode_policies`): each policy claims an episode for itself. It ends in
one transaction, in one of two ways: the update is `done`, its version is recorded and its episodes
are consumed; or it is `abandoned` and its episodes are free again. A unique index allows one
running update per policy (docs/decisions/024-exactly-once.md). Which episodes are claimed is the
query of `store.updates.ready`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, null, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.errors import ClaimLost, LineEnded
from store.ids import new_id
from store.read.episodes import read_episodes
from store.read.pages import update_of
from store.records import Episode, Group, Record, UpdateRow
from store.schema.claimable import episode_policies
from store.schema.recorded import episodes
from store.schema.trained import policies, updates
from store.updates.choice import find_ready
from store.updates.consuming import consume_episodes, end_update
from store.updates.expiry import oldest_version
from store.updates.late_evaluation import refuse_evaluation
from store.updates.ready import EARLIER_MEMBERS, ClaimRule, lock
from store.updates.rolled_back import refuse_rolled_back
from store.version_states import add_version, lock_policies

# The metric that tells an imported version's update: where the adapter came from.
IMPORTED_FROM: Final = "imported_from"


class Claim(Record, frozen=True, kw_only=True):
    """Hold the whole groups claimed for one update, and all else that their credit depends on.

    Episodes with a call sampled by a version before `oldest_version` are stale. `baselines` is
    the state of the moving baselines after the policy's last update, as JSON; None before the
    first. `policy` is the one in training; episodes may also have calls of other policies.
    """

    update_id: UUID
    policy: str
    parent_version: int
    groups: tuple[Group, ...]
    oldest_version: int = 0
    baselines: Mapping[str, Any] | None = None


class Outcome(Record, frozen=True, kw_only=True):
    """State what an update came to for one episode: trained, or the reason why not."""

    episode_id: UUID
    trained: bool
    reason: str | None = None


async def claim(
    connection: AsyncConnection,
    rule: ClaimRule,
    parent_version: int,
    recipe: Mapping[str, Any],
    *,
    takes_most: bool = False,
) -> UUID | None:
    """Claim the freshest complete groups for a new update and return the update's id.

    Return None while there are too few. With `takes_most` there may be more groups (`ClaimRule`).
    The same ledger gives the same claim. Read the claimed episodes with `load_claim` after this
    transaction is committed, so that writers of these episodes' calls and feedback block only while
    the rows are marked.

    Raises:
        ClaimLost: another update of the policy is running.
    """
    oldest = await oldest_version(connection, rule.policy, parent_version, rule.max_staleness)
    taken = await find_ready(connection, rule, oldest, takes_most=takes_most)
    if not taken:
        return None
    limits = {"group_size": rule.group_size, "oldest_version": oldest}
    update_id = await begin_update(connection, rule.policy, parent_version, recipe, **limits)
    await connection.execute(
        update(episode_policies)
        .where(episode_policies.c.policy == rule.policy, episode_policies.c.episode_id.in_(taken))
        .values(claimed_by=update_id)
    )
    return update_id


async def begin_update(
    connection: AsyncConnection,
    policy: str,
    parent_version: int,
    recipe: Mapping[str, Any],
    **limits: int,
) -> UUID:
    """Add a running update that holds no episode yet, and return its id.

    `limits` are the columns that say which episodes it may hold.

    Raises:
        ClaimLost: another update of the policy is running.
    """
    update_id = new_id()
    started = await connection.execute(
        postgresql.insert(updates)
        .values(
            id=update_id,
            policy=policy,
            parent_version=parent_version,
            state="running",
            recipe=dict(recipe),
            **limits,
        )
        .on_conflict_do_nothing()
        .returning(updates.c.id)
    )
    if started.first() is None:
        raise ClaimLost(f"another update of policy {policy} is running; one runs at a time")
    return update_id


async def load_claim(connection: AsyncConnection, update_id: UUID) -> Claim:
    """Read the groups that an update holds or held, in a stable order.

    Groups that are short are filled up with members that earlier updates consumed.

    Raises:
        Damaged: a call cannot be read back.
    """
    head = (await connection.execute(select(updates).where(updates.c.id == update_id))).one()
    task_of = await _held(connection, update_id)
    earlier_of = await _earlier(connection, head, Counter(task_of.values()))
    ids = [*task_of, *(one for earlier in earlier_of.values() for one in earlier)]
    read = {episode.id: episode for episode in await read_episodes(connection, ids)}
    by_task: dict[str, list[Episode]] = {}
    for one, task in task_of.items():
        by_task.setdefault(task, []).append(read[one])
    groups = tuple(
        Group(
            task=task,
            episodes=tuple(members),
            earlier=tuple(read[one] for one in earlier_of.get(task, ())),
        )
        for task, members in by_task.items()
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
    """Map the episodes of an update to their tasks; "" where an episode has none."""
    task = func.coalesce(episodes.c.joined_task, episodes.c.task, "")
    query = (
        select(episodes.c.id, task)
        .join(episode_policies, episode_policies.c.episode_id == episodes.c.id)
        .where(episode_policies.c.claimed_by == update_id)
        .order_by(task, episodes.c.first_call_id)
    )
    return {row[0]: row[1] for row in await connection.execute(query)}


async def _earlier(
    connection: AsyncConnection, head: Any, sizes: Mapping[str, int]
) -> dict[str, list[UUID]]:
    """Return the newest consumed episodes of each task that is short of members, to fill it up."""
    full = head.group_size
    short = {task: full - size for task, size in sizes.items() if task and size < full}
    if not short:
        return {}
    values = {"policy": head.policy, "before": head.claimed_at, "oldest": head.oldest_version}
    earlier: dict[str, list[UUID]] = {}
    for row in await connection.execute(EARLIER_MEMBERS, values | {"tasks": list(short)}):
        members = earlier.setdefault(row.task, [])
        if len(members) < short[row.task]:
            members.append(row.id)
    return earlier


async def _baselines_before(connection: AsyncConnection, head: Any) -> Mapping[str, Any] | None:
    """Return the moving baselines that the policy's last update before `head` left."""
    query = (
        select(updates.c.baselines)
        .where(
            updates.c.policy == head.policy,
            updates.c.state == "done",
            updates.c.baselines.is_not(None),
            updates.c.claimed_at < head.claimed_at,
        )
        .order_by(updates.c.claimed_at.desc(), updates.c.id.desc())
        .limit(1)
    )
    baselines: Mapping[str, Any] | None = (await connection.execute(query)).scalar()
    return baselines


async def running_update(connection: AsyncConnection, policy: str) -> UUID | None:
    """Return the id of the running update of `policy`, or None if there is none."""
    query = select(updates.c.id).where(updates.c.policy == policy, updates.c.state == "running")
    return (await connection.execute(query)).scalar()


async def release(connection: AsyncConnection, update_id: UUID, why: str) -> int:
    """Abandon a running update: free its episodes and return how many there were.

    If the update has ended meanwhile, its episodes stay consumed and the result is 0.
    """
    try:
        await end_update(connection, update_id, "abandoned", {"abandoned": why})
    except ClaimLost:
        return 0
    held = select(episode_policies.c.episode_id).where(episode_policies.c.claimed_by == update_id)
    await lock(connection, list((await connection.execute(held)).scalars()))
    freed = await connection.execute(
        update(episode_policies)
        .where(episode_policies.c.claimed_by == update_id)
        .values(claimed_by=None)
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
    """Record a finished update: consume its episodes and add the version that it made.

    Args:
        connection: an open transaction.
        update_id: the running update.
        outcomes: one for each claimed episode.
        metrics: the update's figures, stored as JSON.
        policy: the policy that was trained.
        version: the new version, or None if nothing was trained (no signal in any group).
        adapter_path: the folder of the new version's adapter.
        baselines: the state that the next update's moving baselines start from.

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
        TurnedEvaluation: a call said since the claim that one of its episodes is evaluation;
            nothing was written.
        HoldsRolledBack: a version that sampled one of them was rolled back since; nothing was
            written.
        LineEnded: the version that it was trained from has ended since; nothing was written.
    """
    await refuse_evaluation(connection, update_id)
    await lock_policies(connection, [policy])
    await refuse_rolled_back(connection, policy, update_id)
    await _refuse_ended(connection, update_id)
    after = null() if baselines is None else dict(baselines)
    await end_update(connection, update_id, "done", metrics, version=version, baselines=after)
    consumed = [(one.episode_id, one.trained, one.reason) for one in outcomes]
    await consume_episodes(connection, update_id, consumed)
    if version is not None and adapter_path is not None:
        source = metrics.get(IMPORTED_FROM)
        await add_version(
            connection, policy, version, adapter_path, update_id, imported_from=source
        )


async def _refuse_ended(connection: AsyncConnection, update_id: UUID) -> None:
    """Check that the version which an update was trained from is still of the policy's line."""
    query = select(policies.c.served_name).where(
        policies.c.name == updates.c.policy,
        policies.c.version == updates.c.parent_version,
        updates.c.id == update_id,
        policies.c.ended_at.is_not(None),
    )
    if (parent := await connection.scalar(query)) is not None:
        raise LineEnded(
            f"update {update_id} was trained from {parent}, which has ended since, as the policy's"
            " line started again: release the update, and claim again"
        )


async def next_version(connection: AsyncConnection, policy: str) -> int:
    """Return the number for the policy's next version: one above all that were recorded."""
    highest = await connection.scalar(
        text("SELECT coalesce(max(version), 0) FROM policies WHERE name = :policy"),
        {"policy": policy},
    )
    return int(highest) + 1


async def list_updates(connection: AsyncConnection, policy: str | None = None) -> list[UpdateRow]:
    """Return the updates of `policy` (None: of every policy) in the order of their claims."""
    query = select(updates).order_by(updates.c.claimed_at, updates.c.id)
    if policy is not None:
        query = query.where(updates.c.policy == policy)
    return [update_of(row) for row in await connection.execute(query)]


async def hold_policy(connection: AsyncConnection, policy: str) -> bool:
    """Try to become the only trainer of `policy`, until the connection ends.

    Return False if another connection holds the policy's advisory lock.
    """
    query = text("SELECT pg_try_advisory_lock(hashtext(:name))")
    held = await connection.scalar(query, {"name": f"pawl-trainer:{policy}"})
    await connection.commit()
    return bool(held)


async def leave_policy(connection: AsyncConnection, policy: str) -> None:
    """Give up a hold on a policy (`hold_policy`): another trainer may have it now."""
    query = text("SELECT pg_advisory_unlock(hashtext(:name))")
    await connection.execute(query, {"name": f"pawl-trainer:{policy}"})
    await connection.commit()


async def still_connected(connection: AsyncConnection) -> None:
    """Check that the connection still works; the hold on the policy ends with it.

    Raises:
        Exception: the connection is lost; `store.connection.availability.is_unavailable` is true of
        the error.
    """
    await connection.execute(text("SELECT 1"))
    await connection.commit()
