"""Claim, release and consume episodes, so that each is trained whole and at most once.

A claim is an update in state `running`. Its id is in the column `claimed_by` of its policy's rows
of `episode_policies`: each policy claims an episode for itself. A claim ends in one transaction, in
one of three states. `done` records the new version and consumes the episodes, `abandoned` frees
them, and `expired` consumes only those that cannot be trained. A unique index allows one running
update per policy (docs/decisions/024-exactly-once.md). `store.claim_query` selects the episodes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import Row, func, insert, literal_column, null, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claim_query import (
    EARLIER_MEMBERS,
    HAS_ROLLED_BACK,
    ClaimRule,
    lock_episodes,
    lock_free_episodes,
    lock_ready_episodes,
    rolled_back_episodes,
)
from store.errors import ClaimLost, ClaimSpoilt
from store.ids import new_id
from store.link.claimable import refresh_policy_rows
from store.read.agreement import trust_in_judges
from store.read.episodes import read_episodes
from store.records import EVAL, TRAIN, Episode, Group, Record, UpdateRow
from store.schema.tables import (
    FREE,
    HAD_TRAFFIC,
    SPLIT,
    episode_policies,
    episodes,
    policies,
    updates,
)
from store.version_states import add_version, lock_policies

# The metric that marks the update of an imported version: where the adapter came from.
IMPORTED_FROM: Final = "imported_from"
# Most episodes that a message about a spoilt claim names.
MAX_NAMED: Final = 5


class Claim(Record, frozen=True, kw_only=True):
    """The groups claimed for one update, and the other inputs from which credit is computed.

    Episodes with a call sampled by a version before `oldest_version` are stale. `trust` is the
    weight of each judge's statements, 0 to 1 (`store.read.agreement`). `baselines` is the state of
    the moving baselines after the policy's last update, as JSON; None before the first. `policy` is
    the policy in training; episodes may also have calls of other policies.
    """

    update_id: UUID
    policy: str
    parent_version: int
    groups: tuple[Group, ...]
    oldest_version: int = 0
    trust: Mapping[str, float] = {}
    baselines: Mapping[str, Any] | None = None


class Outcome(Record, frozen=True, kw_only=True):
    """An episode's outcome in an update: trained, or the reason why not."""

    episode_id: UUID
    trained: bool
    reason: str | None = None


# One array: a retraining may leave out more episodes than a statement may have parameters.
_CLAIM: Final = text(
    """
    UPDATE episode_policies SET claimed_by = :update_id
    WHERE policy = :policy AND episode_id = ANY(CAST(:ids AS uuid[]))
    """
)


async def claim(
    connection: AsyncConnection,
    rule: ClaimRule,
    parent_version: int,
    recipe: Mapping[str, Any],
    *,
    takes_most: bool = False,
    parent_serves: bool = False,
) -> UUID | None:
    """Claim the freshest complete groups for a new update and return the update's id.

    Return None while there are too few. With `takes_most` up to `rule.most_groups` groups are
    claimed. With `parent_serves` staleness is counted as if the parent version served already. The
    same ledger gives the same claim. Read the claimed episodes with `load_claim` after this
    transaction is committed, so that writers of these episodes' calls and feedback block only while
    the rows are marked.

    Raises:
        ClaimLost: another update of the policy is running.
    """
    oldest = await oldest_trainable_version(
        connection, rule.policy, parent_version, rule.max_staleness, parent_serves=parent_serves
    )
    taken = await lock_ready_episodes(connection, rule, oldest, takes_most=takes_most)
    if not taken:
        return None
    trust = await trust_in_judges(connection, rule.policy)
    limits = {"group_size": rule.group_size, "oldest_version": oldest, "trust": trust or null()}
    update_id = await begin_update(connection, rule.policy, parent_version, recipe, **limits)
    values = {"update_id": update_id, "policy": rule.policy, "ids": taken}
    await connection.execute(_CLAIM, values)
    return update_id


async def begin_update(
    connection: AsyncConnection,
    policy: str,
    parent_version: int,
    recipe: Mapping[str, Any],
    **limits: Any,
) -> UUID:
    """Add a running update that holds no episode yet, and return its id.

    `limits` are further columns of its row: `group_size`, `oldest_version` and `trust`.

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
    """Read the groups that an update holds or consumed, in a stable order.

    Groups that are short are filled up with members that earlier updates consumed.

    Raises:
        Damaged: a call cannot be read back.
    """
    query = select(updates).where(updates.c.id == update_id)
    update_row = (await connection.execute(query)).one()
    task_of, earlier_of = await _members(connection, update_row)
    ids = [*task_of, *chain(*earlier_of.values())]
    read = {episode.id: episode for episode in await read_episodes(connection, ids)}
    by_task: dict[str, list[Episode]] = {}
    for episode_id, task in task_of.items():
        by_task.setdefault(task, []).append(read[episode_id])
    groups = tuple(
        Group(
            task=task,
            episodes=tuple(members),
            earlier=tuple(read[episode_id] for episode_id in earlier_of.get(task, ())),
        )
        for task, members in by_task.items()
    )
    return Claim(
        update_id=update_id,
        policy=update_row.policy,
        parent_version=update_row.parent_version,
        groups=groups,
        oldest_version=update_row.oldest_version,
        trust=update_row.trust or {},
        baselines=await _baselines_before(connection, update_row),
    )


async def episodes_of_claim(connection: AsyncConnection, update_id: UUID) -> list[UUID]:
    """Return the ids of the episodes that `load_claim` reads; [] if abandoned or unknown."""
    query = select(updates).where(updates.c.id == update_id)
    update_row = (await connection.execute(query)).first()
    task_of, earlier_of = await _members(connection, update_row) if update_row else ({}, {})
    return [*task_of, *chain(*earlier_of.values())]


async def _members(
    connection: AsyncConnection, update_row: Any
) -> tuple[dict[UUID, str], dict[str, list[UUID]]]:
    """Return the task of each claimed episode, and the earlier members that fill up each task."""
    task_of = await _tasks_of_claimed(connection, update_row.id)
    return task_of, await _earlier_members(connection, update_row, Counter(task_of.values()))


async def _tasks_of_claimed(connection: AsyncConnection, update_id: UUID) -> dict[UUID, str]:
    """Map the episodes that an update holds or consumed to their tasks, or "" without a task."""
    task = func.coalesce(episodes.c.joined_task, episodes.c.task, "")
    query = (
        select(episodes.c.id, task)
        .join(episode_policies, episode_policies.c.episode_id == episodes.c.id)
        .where(episode_policies.c.claimed_by == update_id)
        .order_by(task, episodes.c.first_call_id)
    )
    return {row[0]: row[1] for row in await connection.execute(query)}


async def _earlier_members(
    connection: AsyncConnection, update_row: Any, sizes: Mapping[str, int]
) -> dict[str, list[UUID]]:
    """Return, for each task with too few members (`sizes`), consumed episodes to fill it up.

    The most recently consumed come first.
    """
    full = update_row.group_size
    short = {task: full - size for task, size in sizes.items() if task and size < full}
    if not short:
        return {}
    values = {
        "policy": update_row.policy,
        "before": update_row.claimed_at,
        "oldest": update_row.oldest_version,
    }
    earlier: dict[str, list[UUID]] = {}
    for row in await connection.execute(EARLIER_MEMBERS, values | {"tasks": list(short)}):
        members = earlier.setdefault(row.task, [])
        if len(members) < short[row.task]:
            members.append(row.id)
    return earlier


async def _baselines_before(
    connection: AsyncConnection, update_row: Any
) -> Mapping[str, Any] | None:
    """Return the moving baselines after the policy's last update before this one, if any."""
    query = (
        select(updates.c.baselines)
        .where(
            updates.c.policy == update_row.policy,
            updates.c.state == "done",
            updates.c.baselines.is_not(None),
            updates.c.claimed_at < update_row.claimed_at,
        )
        .order_by(updates.c.claimed_at.desc(), updates.c.id.desc())
        .limit(1)
    )
    baselines: Mapping[str, Any] | None = (await connection.execute(query)).scalar()
    return baselines


async def running_update(connection: AsyncConnection, policy: str) -> UUID | None:
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
    await lock_episodes(connection, list(await _tasks_of_claimed(connection, update_id)))
    freed = await connection.execute(
        update(episode_policies)
        .where(episode_policies.c.claimed_by == update_id)
        .values(claimed_by=None)
    )
    return int(freed.rowcount)


# Ending an update, and consuming its episodes

# The policy is that of the update. The foreign key locks each episode's row of `episode_policies`,
# in the order of `ids`, until the transaction ends.
_CONSUME: Final = text(
    """
    INSERT INTO consumptions (episode_id, policy, update_id, trained, reason)
    SELECT e.id, u.policy, u.id, e.trained, e.reason
    FROM updates u,
        unnest(CAST(:ids AS uuid[]), CAST(:trained AS boolean[]), CAST(:reasons AS text[]))
            WITH ORDINALITY AS e (id, trained, reason, place)
    WHERE u.id = :update_id ORDER BY e.place
    """
)


async def record_update(
    connection: AsyncConnection,
    update_id: UUID,
    outcomes: Sequence[Outcome],
    metrics: Mapping[str, Any],
    *,
    policy: str,
    version: int | None,
    adapter_path: str | None,
    rule: Mapping[str, Any] | None = None,
    baselines: Mapping[str, Any] | None = None,
) -> None:
    """Record a finished update: consume its episodes and add the version that it made.

    `outcomes` has one for each claimed episode. `version` is None if nothing was trained, as no
    group had a signal. `rule` is what the version is judged by (`add_version`). `baselines` is the
    state that the next update's moving baselines start from.

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
        ClaimSpoilt: since the claim an episode became evaluation, a version that sampled one was
            rolled back, or the parent version failed or ended; nothing was written.
    """
    await _check_none_is_evaluation(connection, update_id)
    await lock_policies(connection, [policy])
    await _check_none_is_rolled_back(connection, policy, update_id)
    await _check_parent_is_sound(connection, update_id)
    after = null() if baselines is None else dict(baselines)
    await end_update(connection, update_id, "done", metrics, version=version, baselines=after)
    await consume_episodes(connection, update_id, outcomes)
    if version is not None and adapter_path is not None:
        source = metrics.get(IMPORTED_FROM)
        await add_version(
            connection, policy, version, adapter_path, update_id, rule=rule, imported_from=source
        )


# Calls that a deletion has locked are skipped, so that neither transaction waits for the other.
_KEEP_LOGPROBS: Final = text(
    """
    WITH free AS (
        SELECT t.id, n.logprobs FROM transitions t
        JOIN unnest(CAST(:calls AS uuid[]), CAST(:logprobs AS bytea[])) AS n (id, logprobs)
            ON n.id = t.id
        WHERE t.id = ANY(CAST(:calls AS uuid[])) AND t.policy_logprobs IS DISTINCT FROM n.logprobs
        FOR NO KEY UPDATE OF t SKIP LOCKED)
    UPDATE transitions t SET policy_logprobs = free.logprobs
    FROM free WHERE t.id = free.id AND t.id = ANY(CAST(:calls AS uuid[]))
    """
)


async def keep_policy_logprobs(
    connection: AsyncConnection, of_calls: Mapping[UUID, bytes | None]
) -> None:
    """Store the log-probabilities that the policy, in training, gave to calls' sampled ids.

    `of_calls` maps a call's id to them (packed), or to None if this update computed none: then
    those of an earlier update are removed.
    """
    values = {"calls": list(of_calls), "logprobs": list(of_calls.values())}
    await connection.execute(_KEEP_LOGPROBS, values)


# Locked in the order of keys, as everywhere, until the caller's transaction ends.
_HELD_SPLITS: Final = text(
    f"SELECT key, {SPLIT} AS split FROM episodes"
    " WHERE id IN (SELECT episode_id FROM episode_policies WHERE claimed_by = :update_id)"
    " ORDER BY key FOR NO KEY UPDATE"
)
_HELD_ROLLED_BACK: Final = text(
    f"""
    SELECT e.key FROM episode_policies JOIN episodes e ON e.id = episode_policies.episode_id
    WHERE episode_policies.claimed_by = :update_id AND {HAS_ROLLED_BACK} ORDER BY e.key
    """
)


async def _check_none_is_evaluation(connection: AsyncConnection, update_id: UUID) -> None:
    """Lock an update's episodes, so that none becomes evaluation before it is consumed.

    Raises:
        ClaimSpoilt: an episode became evaluation after the claim.
    """
    held = await connection.execute(_HELD_SPLITS, {"update_id": update_id})
    evaluation = [row.key for row in held if row.split == EVAL]
    if evaluation:
        named = ", ".join(map(repr, evaluation[:MAX_NAMED]))
        raise ClaimSpoilt(
            f"{len(evaluation)} episodes of update {update_id} became evaluation after it had"
            f" claimed them ({named}): release the update, and claim again"
        )


async def _check_none_is_rolled_back(
    connection: AsyncConnection, policy: str, update_id: UUID
) -> None:
    """Check that no version that sampled an update's episodes was rolled back since the claim.

    The caller has locked the policy (`store.version_states.lock_policies`): no roll-back follows.

    Raises:
        ClaimSpoilt: such a version was rolled back.
    """
    values = {"policy": policy, "update_id": update_id}
    held = list((await connection.execute(_HELD_ROLLED_BACK, values)).scalars())
    if held:
        named = ", ".join(map(repr, held[:MAX_NAMED]))
        raise ClaimSpoilt(
            f"a version that sampled {len(held)} episodes of update {update_id} was rolled back"
            f" after it had claimed them ({named}): release the update, and claim again"
        )


async def _check_parent_is_sound(connection: AsyncConnection, update_id: UUID) -> None:
    """Check that an update's parent version has neither failed nor ended.

    Otherwise the new version would descend from a rolled-back one, and not be rolled back with it.

    Raises:
        ClaimSpoilt: the parent version has failed or ended.
    """
    query = select(policies.c.served_name).where(
        policies.c.name == updates.c.policy,
        policies.c.version == updates.c.parent_version,
        updates.c.id == update_id,
        policies.c.ended_at.is_not(None) | policies.c.state.in_(("rejected", "rolled_back")),
    )
    if (parent := await connection.scalar(query)) is not None:
        raise ClaimSpoilt(
            f"update {update_id} was trained from {parent}, which has failed since, or has ended as"
            " the policy's line started again: release the update, and claim again"
        )


async def consume_episodes(
    connection: AsyncConnection, update_id: UUID, outcomes: Sequence[Outcome]
) -> None:
    """Consume episodes for an update's policy, in the caller's transaction and the given order.

    Raises:
        sqlalchemy.exc.IntegrityError: the policy has consumed an episode already, or never had a
            call of it, or a reason is missing.
    """
    values = {
        "update_id": update_id,
        "ids": [outcome.episode_id for outcome in outcomes],
        "trained": [outcome.trained for outcome in outcomes],
        "reasons": [outcome.reason for outcome in outcomes],
    }
    await connection.execute(_CONSUME, values)


async def end_update(
    connection: AsyncConnection,
    update_id: UUID,
    state: str,
    metrics: Mapping[str, Any],
    **columns: Any,
) -> None:
    """Move a running update to its final `state`, with its metrics and other `columns`.

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
    """
    ended = await connection.execute(
        update(updates)
        .where(updates.c.id == update_id, updates.c.state == "running")
        .values(state=state, metrics=dict(metrics), finished_at=text("now()"), **columns)
        .returning(updates.c.id)
    )
    if ended.first() is None:
        raise ClaimLost(f"update {update_id} is no longer running, so it cannot be made {state}")


# Consuming episodes that cannot be trained any more

# Most episodes that one transaction expires.
MOST_EXPIRED: Final = 1000
# Why an episode was consumed untrained.
ROLLED_BACK: Final = "rolled_back"

_OLDEST = text(
    f"""
    SELECT version FROM policies p
    WHERE name = :policy AND version <= :parent AND state <> 'rolled_back' AND ended_at IS NULL
        AND ({HAD_TRAFFIC} OR (:parent_serves AND version = :parent))
    ORDER BY version DESC OFFSET :staleness LIMIT 1
    """
)
_STALE = text(
    f"""
    SELECT episode_id FROM episode_policies
    WHERE policy = :policy AND {FREE} AND version < :oldest
        AND (:group_size = 1 OR task IS NULL
            OR GREATEST(last_call_at, scored_at) < now() - make_interval(secs => :max_age_s))
    ORDER BY version, episode_id LIMIT :most
    """
)


async def oldest_trainable_version(
    connection: AsyncConnection,
    policy: str,
    parent: int,
    max_staleness: int | None,
    *,
    parent_serves: bool = False,
) -> int:
    """Return the lowest version whose episodes an update from version `parent` may train on.

    Staleness counts the versions that had traffic and were neither rolled back nor ended, and with
    `parent_serves` also the parent, which is about to get traffic. Without `max_staleness` (None),
    return 0.
    """
    if max_staleness is None:
        return 0
    values = {
        "policy": policy,
        "parent": parent,
        "staleness": max_staleness,
        "parent_serves": parent_serves,
    }
    return int(await connection.scalar(_OLDEST, values) or 0)


async def expire_episodes(
    connection: AsyncConnection, rule: ClaimRule, parent: int, recipe: Mapping[str, Any]
) -> dict[str, int]:
    """Consume up to `MOST_EXPIRED` stale or rolled-back episodes untrained.

    A stale episode that may fill a group is left until `rule.max_age_s` seconds after its last call
    and its reward. Return the number of consumed episodes by reason.
    """
    oldest = await oldest_trainable_version(connection, rule.policy, parent, rule.max_staleness)
    rolled_back = await rolled_back_episodes(connection, rule.policy, MOST_EXPIRED)
    values = {
        "policy": rule.policy,
        "oldest": oldest,
        "group_size": rule.group_size,
        "max_age_s": rule.max_age_s,
        "most": MOST_EXPIRED - len(rolled_back),
    }
    stale = (await connection.execute(_STALE, values)).scalars()
    past_limits = dict.fromkeys(stale, "stale") | dict.fromkeys(rolled_back, ROLLED_BACK)
    free = await lock_free_episodes(connection, rule.policy, list(past_limits))
    reasons = {episode: reason for episode, reason in past_limits.items() if episode in free}
    return await consume_unclaimed(connection, rule.policy, parent, recipe, reasons, oldest=oldest)


async def consume_unclaimed(
    connection: AsyncConnection,
    policy: str,
    parent: int,
    recipe: Mapping[str, Any],
    reasons: Mapping[UUID, str],
    *,
    oldest: int = 0,
) -> dict[str, int]:
    """Consume unclaimed episodes untrained; `reasons` maps each to the reason why.

    The caller has locked them. They are recorded with a new update from version `parent`, in state
    `expired`. Return the number of episodes by reason.
    """
    counted = dict(Counter(reasons.values()))
    if not counted:
        return {}
    update_id = new_id()
    await connection.execute(
        insert(updates).values(
            id=update_id,
            policy=policy,
            parent_version=parent,
            oldest_version=oldest,
            state="expired",
            recipe=dict(recipe),
            metrics={"episodes": len(reasons), "trained_episodes": 0, "dropped": counted},
            finished_at=text("now()"),
        )
    )
    await connection.execute(
        _CLAIM, {"update_id": update_id, "policy": policy, "ids": list(reasons)}
    )
    outcomes = [
        Outcome(episode_id=episode_id, trained=False, reason=reason)
        for episode_id, reason in reasons.items()
    ]
    await consume_episodes(connection, update_id, outcomes)
    return counted


DAMAGED: Final = "damaged"
NON_FINITE: Final = "non_finite"
CANNOT_BE_READ: Final = "a call of this episode cannot be read back"


async def end_unusable_claim(
    connection: AsyncConnection,
    update_id: UUID,
    damaged: Mapping[UUID, str],
    reason: str = DAMAGED,
    figures: Mapping[str, Any] | None = None,
) -> int:
    """End a running update whose claim has unusable episodes; return how many were consumed.

    `damaged` maps each unusable episode to what is wrong with it. Those still in the training split
    are consumed for `reason`; if that is `DAMAGED`, all are quarantined, too. The claim's other
    episodes are free again. `figures` are recorded with the update as well.

    Raises:
        ClaimLost: the update is no longer running; nothing was written.
    """
    claimed = await _tasks_of_claimed(connection, update_id)
    # Lock all rows that change below.
    await lock_episodes(connection, [*claimed, *damaged])
    # Episodes that became evaluation meanwhile are not consumed.
    training = select(episodes.c.id).where(
        episodes.c.id.in_(claimed.keys() & damaged.keys()), literal_column(SPLIT) == TRAIN
    )
    to_consume = set((await connection.execute(training)).scalars())
    consumed = [episode_id for episode_id in damaged if episode_id in to_consume]
    metrics = {
        **(figures or {}),
        "episodes": len(consumed),
        "trained_episodes": 0,
        "dropped": {reason: len(consumed)} if consumed else {},
        reason: {str(episode_id): why for episode_id, why in damaged.items()},
    }
    await end_update(connection, update_id, "expired" if consumed else "abandoned", metrics)
    outcomes = [
        Outcome(episode_id=episode_id, trained=False, reason=reason) for episode_id in consumed
    ]
    await consume_episodes(connection, update_id, outcomes)
    if reason == DAMAGED:
        await connection.execute(
            update(episodes)
            .where(episodes.c.id.in_(damaged))
            .values(quarantined_reason=CANNOT_BE_READ)
        )
        await refresh_policy_rows(connection, damaged)
    await connection.execute(
        update(episode_policies)
        .where(
            episode_policies.c.claimed_by == update_id,
            episode_policies.c.episode_id.not_in(consumed),
        )
        .values(claimed_by=None)
    )
    return len(consumed)


# Reading updates, and holding a policy


async def last_updates(connection: AsyncConnection, policy: str, most: int) -> Sequence[Row[Any]]:
    """Return a policy's last done and expired updates, newest first, at most `most`.

    A row has state, parent version, claim time and metrics.
    """
    query = (
        select(*(updates.c[name] for name in ("state", "parent_version", "claimed_at", "metrics")))
        .where(updates.c.policy == policy, updates.c.state.in_(("done", "expired")))
        .order_by(updates.c.claimed_at.desc(), updates.c.id.desc())
        .limit(most)
    )
    return (await connection.execute(query)).all()


async def abandoned_in_a_row(connection: AsyncConnection, policy: str, why: str) -> int:
    """Return how many of a policy's newest ended updates in a row were abandoned for `why`.

    At most 16 are counted.
    """
    query = (
        select(updates.c.state, updates.c.metrics["abandoned"].astext)
        .where(updates.c.policy == policy, updates.c.state != "running")
        .order_by(updates.c.claimed_at.desc(), updates.c.id.desc())
        .limit(16)
    )
    ends = (await connection.execute(query)).all()
    return sum(1 for _ in takewhile(lambda end: tuple(end) == ("abandoned", why), ends))


async def next_version(connection: AsyncConnection, policy: str) -> int:
    """Return the next unused version number of a policy."""
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
    rows = await connection.execute(query)
    return [msgspec.convert(row, UpdateRow, from_attributes=True) for row in rows]


async def hold_policy(connection: AsyncConnection, policy: str) -> bool:
    """Try once to lock `policy` for its only trainer; return False if another connection holds it.

    The lock is kept until `release_policy`, or until the connection ends.
    """
    query = text("SELECT pg_try_advisory_lock(hashtext(:name))")
    held = await connection.scalar(query, {"name": f"pawl-trainer:{policy}"})
    await connection.commit()
    return bool(held)


async def release_policy(connection: AsyncConnection, policy: str) -> None:
    """Release the lock of `hold_policy`, so that another trainer can train the policy."""
    query = text("SELECT pg_advisory_unlock(hashtext(:name))")
    await connection.execute(query, {"name": f"pawl-trainer:{policy}"})
    await connection.commit()


async def check_connected(connection: AsyncConnection) -> None:
    """Check that the connection still works; its lock on the policy would be lost with it.

    Raises:
        Exception: the connection is lost; `store.database.is_unavailable` is true of
        the error.
    """
    await connection.execute(text("SELECT 1"))
    await connection.commit()
