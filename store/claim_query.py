"""Say which episodes are ready for a policy's next update: complete groups, the freshest first.

Those whose reward is of the latest minute come first, whatever version sampled them: an episode of
half an hour began with an older one than those of two minutes, and must not be left over for that.
Within a minute newer versions come first; among equals, those that waited longest. If more episodes
arrive than are trained, those that have waited longer than others are left over.

Groups whose final rewards are all equal teach nothing, or little (AIR may differ), and do not make
an update: they are taken along, or by themselves, and so consumed. A learner that imitates
successes waits for groups with one instead (docs/decisions/018-groups.md).

Two kinds of episodes are left where they are: those that a model server sampled while it was at
fault, which expire like any that wait too long (docs/decisions/053-pause-after-failures.md); and
those with a call of a version that was rolled back, which may have found a way to a bad reward.

Stale episodes, such as most of the control's, are members of their group: it waits for no other in
their place, they are compared with, and consumed untrained.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.records import Record
from store.schema.tables import FREE, HAD_TRAFFIC, minute_of

# How many of the last updates are searched for consumed members to compare a late member with.
EARLIER_UPDATES = 32


class ClaimRule(Record, frozen=True, kw_only=True):
    """Decide when a group is complete, and when there are enough groups for an update.

    A group of `group_size` scored episodes is complete, and `groups` groups make an update. Once a
    group has waited `max_age_s` seconds since its first reward, fewer groups are enough; and that
    group may itself be smaller if it has `smallest_group` members, counting those that earlier
    updates consumed. With a `group_size` of 1 every episode is its own group, with or without a
    task. An update that had to wait takes up to `most_groups` (None: `groups`, as others do).

    With `needs_spread` only groups whose rewards differ count for this. As many others are taken
    along; and where too few differ, `groups` others, or fewer that have waited as long, are taken
    by themselves. What is compared is each episode's newest reward, and `failed_reward` for failed
    ones without any. With `least_reward` the groups that count are those with a member whose reward
    is not less, of one episode or of several; these members are taken first.

    Two kinds of episode count as members after they have been silent for some seconds (None:
    never): a failed one without a reward after `failed_after_s`; one whose only rewards are for
    single calls, `call_rewards_after_s` after its last call or such reward. Episodes sampled more
    than `max_staleness` versions ago are stale (None: none are): they fill groups with
    `smallest_group` others, and expire after `max_age_s` (`store.claims`).
    """

    policy: str
    group_size: int
    groups: int
    smallest_group: int
    max_age_s: float
    max_staleness: int | None = None
    failed_after_s: float | None = None
    call_rewards_after_s: float | None = None
    needs_spread: bool = False
    failed_reward: float | None = None
    most_groups: int | None = None
    least_reward: float | None = None


_SCORED = f"""
    SELECT episode_id AS id, task, version, scored_at AS at, reward, version >= :oldest AS is_fresh
    FROM episode_policies
    WHERE policy = :policy AND scored_at IS NOT NULL AND {FREE}
"""
# No reward marks the end of such an episode, so it counts as over once all its parts are silent.
# Which of its calls' rewards are compared is not known here.
_CALL_SCORED = f"""
    UNION ALL
    SELECT episode_id, task, version, GREATEST(last_call_at, call_scored_at)
        + make_interval(secs => :call_rewards_after_s), reward, version >= :oldest
    FROM episode_policies
    WHERE policy = :policy AND call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE}
        AND GREATEST(last_call_at, call_scored_at)
            < now() - make_interval(secs => :call_rewards_after_s)
"""
# If rewards for single calls count, an episode that has one counts as rewarded.
_FAILED = f"""
    UNION ALL
    SELECT episode_id, task, version, last_call_at + make_interval(secs => :failed_after_s),
        CAST(:failed_reward AS double precision), version >= :oldest
    FROM episode_policies
    WHERE policy = :policy AND failed AND scored_at IS NULL AND {FREE}
        AND NOT (:calls_are_paid AND call_scored_at IS NOT NULL)
        AND last_call_at < now() - make_interval(secs => :failed_after_s)
"""
# Members of each task that the policy's last updates before a given time consumed. OFFSET 0 makes
# the planner look each update up: it would rather read all that was ever consumed.
_EARLIER = f"""
    SELECT p.episode_id AS id, p.task, u.claimed_at, p.reward, p.failed
    FROM (SELECT id, claimed_at FROM updates
          WHERE policy = :policy AND state = 'done' AND claimed_at < CAST(:before AS timestamptz)
          ORDER BY claimed_at DESC LIMIT {EARLIER_UPDATES}) u
    CROSS JOIN LATERAL (
        SELECT episode_id, policy FROM consumptions WHERE update_id = u.id OFFSET 0) c
    JOIN episode_policies p ON (p.episode_id, p.policy) = (c.episode_id, c.policy)
    WHERE p.task IS NOT NULL AND p.version >= :oldest AND p.claimable
        AND (p.scored_at IS NOT NULL OR p.call_scored_at IS NOT NULL OR p.failed)
"""
EARLIER_MEMBERS = text(
    f"SELECT id, task FROM ({_EARLIER}) e WHERE task = ANY(:tasks) ORDER BY claimed_at DESC, id"
)
_GROUPS = f"""
    WITH ready AS ({{ready}}),
    consumed AS (
        SELECT task, count(*) AS members, min(reward) AS least, max(reward) AS most
        FROM (SELECT task, COALESCE(reward, CASE WHEN failed
                  THEN CAST(:failed_reward AS double precision) END) AS reward
              FROM ({{earlier}}) e) compared
        GROUP BY task),
    found AS (
        SELECT task, count(*) AS members, count(*) FILTER (WHERE is_fresh) AS fresh,
            min(at) FILTER (WHERE is_fresh) AS first, max(version) AS newest, max(at) AS last,
            min(reward) AS least, max(reward) AS most,
            min(reward) FILTER (WHERE is_fresh) AS fresh_least,
            max(reward) FILTER (WHERE is_fresh) AS fresh_most
        FROM ready WHERE task IS NOT NULL GROUP BY task HAVING bool_or(is_fresh)),
    complete AS (
        SELECT task, newest, first, last, COALESCE(c.members, 0) AS earlier,
            COALESCE({{signal}}, false) AS has_signal
        FROM found g LEFT JOIN consumed c USING (task)
        WHERE g.fresh >= :group_size
            OR (g.fresh + COALESCE(c.members, 0) >= :smallest_group
                AND (g.members >= :group_size
                    OR first < now() - make_interval(secs => :max_age_s))))
    SELECT task, extract(epoch FROM now() - first) AS age_s, earlier, has_signal
    FROM (SELECT *, row_number() OVER (
              PARTITION BY has_signal
              ORDER BY {minute_of("last")} DESC, newest DESC, first, task) AS place
          FROM complete) placed
    WHERE place <= :groups ORDER BY {minute_of("last")} DESC, newest DESC, first, task
"""
_MEMBERS = f"""
    SELECT m.* FROM unnest(CAST(:tasks AS text[])) AS t (task) CROSS JOIN LATERAL (
        SELECT id, task FROM ({{ready}}) r WHERE r.task = t.task
        ORDER BY is_fresh DESC, {{best}}{minute_of("at")} DESC, version DESC, at, id
        LIMIT :group_size) m
"""
_SINGLES = f"""
    SELECT id, extract(epoch FROM now() - at) AS age_s, {{has_signal}} AS has_signal
    FROM ({{ready}}) r WHERE is_fresh AND {{condition}}
    ORDER BY {minute_of("at")} DESC, version DESC, at, id LIMIT :groups
"""
# What makes a group count, of the rewards of those that wait (g) and those consumed earlier (c):
# fresh ones fill it first, then stale ones; what is short then is compared with earlier ones.
_ANY_SIGNAL = "true"
_SPREAD = """CASE WHEN g.fresh >= :group_size THEN g.fresh_least < g.fresh_most
                WHEN g.members >= :group_size THEN g.least < g.most
                ELSE LEAST(g.least, c.least) < GREATEST(g.most, c.most) END"""
_SUCCESS = "g.fresh_most >= :least_reward"
# Of single episodes; and before all others of a group those with the reward that it counts for.
_IS_SUCCESS = "COALESCE(reward >= :least_reward, false)"
_BEST_FIRST = f"{_IS_SUCCESS} DESC, "
# This waits for transactions that hold a member (SKIP LOCKED would claim a group that is not
# whole). Locks are taken in the order of keys, as everywhere, so that there are no deadlocks.
_LOCK = text("SELECT FROM episodes WHERE id = ANY(:ids) ORDER BY key FOR NO KEY UPDATE")
# A statement of its own: one that locks would see the claims as they were before it waited.
_FREE = text(
    "SELECT episode_id FROM episode_policies"
    f" WHERE policy = :policy AND episode_id = ANY(:ids) AND {FREE}"
)


async def find_ready(
    connection: AsyncConnection, rule: ClaimRule, oldest: int, *, takes_most: bool = False
) -> list[UUID]:
    """Select and lock the episodes of the next update; return none while there are too few.

    `oldest` is the first version whose episodes may be trained. With `takes_most` there are up to
    `rule.most_groups` groups.
    """
    ready, values = _ready_of(rule, await _not_left(connection, rule.policy))
    most = (takes_most and rule.most_groups) or rule.groups
    values |= {"policy": rule.policy, "oldest": oldest, "groups": most}
    groups = chosen_groups(await _first_groups(connection, rule, ready, values), rule)
    return await _lock_members(connection, rule, ready, values, groups) if groups else []


def chosen_groups(rows: Sequence[Any], rule: ClaimRule) -> Sequence[Any]:
    """Return the groups to take, in their order: none while there are too few."""
    if _enough([row for row in rows if row.has_signal], rule):
        return rows
    without = [row for row in rows if not row.has_signal]
    return without if _enough(without, rule) else []


def _enough(rows: Sequence[Any], rule: ClaimRule) -> bool:
    waited = any(row.age_s >= rule.max_age_s for row in rows)
    return bool(rows) and (len(rows) >= rule.groups or waited)


async def _first_groups(
    connection: AsyncConnection, rule: ClaimRule, ready: str, values: dict[str, Any]
) -> Sequence[Any]:
    """Return the first groups with and without signal, in order."""
    if rule.group_size == 1:
        return (await connection.execute(_singles_of(rule, ready), values)).all()
    limits = {
        "before": await connection.scalar(text("SELECT now()")),
        "group_size": rule.group_size,
        "smallest_group": rule.smallest_group,
        "max_age_s": rule.max_age_s,
        "failed_reward": rule.failed_reward,
    }
    query = text(_GROUPS.format(ready=ready, earlier=_EARLIER, signal=_signal_of(rule)))
    return (await connection.execute(query, values | limits)).all()


async def _lock_members(
    connection: AsyncConnection,
    rule: ClaimRule,
    ready: str,
    values: dict[str, Any],
    groups: Sequence[Any],
) -> list[UUID]:
    """Lock the first members of groups; return the free ones, of groups that still suffice."""
    if rule.group_size == 1:
        members = [([row.id], 0) for row in groups]
    else:
        best = "" if rule.least_reward is None else _BEST_FIRST
        limits = {"tasks": [row.task for row in groups], "group_size": rule.group_size}
        query = text(_MEMBERS.format(ready=ready, best=best))
        by_task: dict[str, list[UUID]] = {}
        for row in await connection.execute(query, values | limits):
            by_task.setdefault(row.task, []).append(row.id)
        members = [(by_task.get(row.task, []), row.earlier) for row in groups]
    free = await lock_free(connection, rule.policy, [id_ for ids, _ in members for id_ in ids])
    fewest = min(rule.smallest_group, rule.group_size)
    taken: list[UUID] = []
    for ids, earlier in members:
        still_free = [id_ for id_ in ids if id_ in free]
        if still_free and len(still_free) + earlier >= fewest:
            taken += still_free
    return taken


def _ready_of(rule: ClaimRule, but: str) -> tuple[str, dict[str, Any]]:
    """Return the query of episodes that are members, and its values; `but` ends each part of it."""
    ready, values = _SCORED + but, dict[str, Any]()
    if rule.least_reward is not None:
        values["least_reward"] = rule.least_reward
    if rule.call_rewards_after_s is not None:
        ready += _CALL_SCORED + but
        values["call_rewards_after_s"] = rule.call_rewards_after_s
    if rule.failed_after_s is not None:
        ready += _FAILED + but
        values["failed_after_s"] = rule.failed_after_s
        values["failed_reward"] = rule.failed_reward
        values["calls_are_paid"] = rule.call_rewards_after_s is not None
    return ready, values


async def lock(connection: AsyncConnection, ids: Sequence[UUID]) -> None:
    """Lock these episodes, and so what policies may claim of them, until the transaction ends."""
    await connection.execute(_LOCK, {"ids": list(ids)})


async def lock_free(connection: AsyncConnection, policy: str, ids: Sequence[UUID]) -> set[UUID]:
    """Lock these episodes, and return those that no update of `policy` has claimed."""
    await lock(connection, ids)
    values = {"policy": policy, "ids": list(ids)}
    return set((await connection.execute(_FREE, values)).scalars())


def _singles_of(rule: ClaimRule, ready: str) -> TextClause:
    """Return the query of the first episodes; of either kind, where only some of them count."""
    if rule.least_reward is None:
        every = {"has_signal": "true", "condition": "true"}
        return text(_SINGLES.format(ready=ready, **every))
    kinds = {"true": _IS_SUCCESS, "false": f"NOT {_IS_SUCCESS}"}
    parts = [
        _SINGLES.format(ready=ready, has_signal=has_signal, condition=condition)
        for has_signal, condition in kinds.items()
    ]
    return text(" UNION ALL ".join(f"({part})" for part in parts))


def _signal_of(rule: ClaimRule) -> str:
    """Return the condition for a group that counts."""
    if rule.least_reward is not None:
        return _SUCCESS
    return _SPREAD if rule.needs_spread else _ANY_SIGNAL


# What is left where it is

# A condition on rows of `episode_policies`. An episode's id is that of its first stored call, so
# comparing it limits the time at which it began.
NOT_ASIDE: Final = """
    NOT EXISTS (
        SELECT FROM fault_times f
        WHERE f.policy = :policy AND last_call_at >= f.called_since AND episode_id < f.began_before)
"""
# What was claimed for the last version that went live was right, and what ended before that claim.
_NOTE: Final = text(
    f"""
    INSERT INTO fault_times AS known (policy, called_since, began_before)
    VALUES (:policy, COALESCE((
        SELECT max(u.claimed_at) FROM updates u
            JOIN policies p ON (p.name, p.version) = (u.policy, u.version)
        WHERE u.policy = :policy AND {HAD_TRAFFIC}), to_timestamp(0)), :began_before)
    ON CONFLICT (policy, called_since) DO UPDATE
        SET began_before = GREATEST(known.began_before, excluded.began_before)
    """
)
_ASIDE: Final = text(
    f"SELECT count(*) FROM episode_policies WHERE policy = :policy AND {FREE} AND NOT ({NOT_ASIDE})"
)


# How long after it was unloaded a version may still get episodes that began with another, in
# records that are stored late.
_LATE: Final = "interval '1 hour'"
# An episode has calls of its lowest and its highest version. Whether it has any of one in between,
# which it then left as that was unloaded, only its calls tell.
HAS_ROLLED_BACK: Final = """
    EXISTS (
        SELECT FROM policies lost
        WHERE lost.name = :policy AND lost.state = 'rolled_back'
            AND lost.version BETWEEN episode_policies.version AND episode_policies.latest
            AND (lost.version IN (episode_policies.version, episode_policies.latest) OR EXISTS (
                SELECT FROM episodes part JOIN transitions t ON t.episode_id = part.id
                WHERE (part.id = episode_policies.episode_id
                        OR part.root = episode_policies.episode_id)
                    AND t.policy = lost.name AND t.policy_version = lost.version)))
"""
# By index those that began with such a version. Those that came to it from an older one can only be
# among the free episodes of all older ones, and are looked for while there may be more of them.
_TO_EXPIRE: Final = text(
    f"""
    SELECT w.episode_id FROM policies lost CROSS JOIN LATERAL (
        SELECT episode_id FROM episode_policies
        WHERE policy = :policy AND {FREE} AND version = lost.version
        ORDER BY episode_id LIMIT :most) w
    WHERE lost.name = :policy AND lost.state = 'rolled_back'
    UNION
    SELECT episode_id FROM episode_policies
    WHERE policy = :policy AND {FREE} AND latest > version AND version < (
            SELECT max(lost.version) FROM policies lost
            WHERE lost.name = :policy AND lost.state = 'rolled_back'
                AND (lost.unloaded_at IS NULL OR lost.changed_at > now() - {_LATE}))
        AND {HAS_ROLLED_BACK}
    LIMIT :most
    """
)
_WERE_FAULTS: Final = text("SELECT EXISTS (SELECT FROM fault_times WHERE policy = :policy)")
_WERE_ROLLED_BACK: Final = text(
    "SELECT EXISTS (SELECT FROM policies WHERE name = :policy AND state = 'rolled_back')"
)


async def _not_left(connection: AsyncConnection, policy: str) -> str:
    """Return how a query of a policy's rows of `episode_policies` ends, to leave some out.

    It is empty for a policy whose servers never were at fault and of which nothing was rolled back,
    which costs nothing then.
    """
    values = {"policy": policy}
    faults = await connection.scalar(_WERE_FAULTS, values)
    rolled_back = await connection.scalar(_WERE_ROLLED_BACK, values)
    return (f" AND {NOT_ASIDE}" if faults else "") + (
        f" AND NOT {HAS_ROLLED_BACK}" if rolled_back else ""
    )


async def note_fault(connection: AsyncConnection, policy: str) -> int:
    """Set aside what may have been sampled under a fault that is past now; return how much waits.

    The fault began after the claim of the last update whose version went live.
    """
    now = (await connection.execute(text("SELECT now()"))).scalar_one()
    await connection.execute(_NOTE, {"policy": policy, "began_before": lowest_id_at(now)})
    return int((await connection.execute(_ASIDE, {"policy": policy})).scalar_one())


async def rolled_back_episodes(connection: AsyncConnection, policy: str, most: int) -> list[UUID]:
    """Return up to `most` free episodes with a call of a version that was rolled back."""
    values: dict[str, Any] = {"policy": policy, "most": most}
    if not await connection.scalar(_WERE_ROLLED_BACK, values):
        return []
    return list((await connection.execute(_TO_EXPIRE, values)).scalars())


# What waits

# Whole groups alone, and where an update waits for spread only those whose rewards differ, or for a
# reward only those with it: what is left over of a task waits for more members, or for its age.
_COUNTS: Final = (
    "COALESCE(reward >= CAST(:least_reward AS double precision),"
    " CAST(:least_reward AS double precision) IS NULL)"
)
_WITH_SIGNAL: Final = f"""
    SELECT coalesce(sum(members / :group_size), 0) FROM (
        SELECT count(*) FILTER (WHERE :group_size > 1 OR {_COUNTS}) AS members
        FROM episode_policies
        WHERE policy = :policy AND {FREE} AND (task IS NOT NULL OR :group_size = 1)
            AND (scored_at IS NOT NULL OR (:calls_are_paid AND call_scored_at IS NOT NULL))
            {{but}}
        GROUP BY task
        HAVING (NOT CAST(:needs_spread AS boolean) OR min(reward) < max(reward))
            AND bool_or({_COUNTS})) counted
"""


async def waiting_updates(connection: AsyncConnection, rule: ClaimRule) -> float:
    """Return how many updates under `rule` could be made of the whole groups that wait."""
    values = {
        "policy": rule.policy,
        "group_size": rule.group_size,
        "calls_are_paid": rule.call_rewards_after_s is not None,
        "needs_spread": rule.needs_spread and rule.group_size > 1,
        "least_reward": rule.least_reward,
    }
    but = await _not_left(connection, rule.policy)
    groups = await connection.scalar(text(_WITH_SIGNAL.format(but=but)), values)
    return int(groups or 0) / rule.groups


_ALONE: Final = f"""
    SELECT coalesce(sum(members), 0) AS waiting, coalesce(sum(members) FILTER (
        WHERE (task IS NULL OR members < :smallest_group)
            AND first < now() - make_interval(secs => :max_age_s)), 0) AS alone
    FROM (
        SELECT task, count(*) AS members, min(scored_at) AS first FROM episode_policies
        WHERE policy = :policy AND scored_at IS NOT NULL AND {FREE} {{but}}
        GROUP BY task) counted
"""


async def waiting_alone(connection: AsyncConnection, rule: ClaimRule) -> tuple[int, int]:
    """Return how many scored episodes wait, and how many of them wait for a group in vain."""
    if rule.group_size == 1:
        return 0, 0
    values = {
        "policy": rule.policy,
        "smallest_group": rule.smallest_group,
        "max_age_s": rule.max_age_s,
    }
    but = await _not_left(connection, rule.policy)
    row = (await connection.execute(text(_ALONE.format(but=but)), values)).one()
    return int(row.waiting), int(row.alone)


# A count for each of two partial indexes, which hold little more than what is counted.
_WAITING = text(
    f"""
    SELECT policy, sum(episodes) AS episodes FROM (
        SELECT policy, count(*) AS episodes FROM episode_policies
        WHERE scored_at IS NOT NULL AND {FREE} GROUP BY policy
        UNION ALL SELECT policy, count(*) FROM episode_policies
        WHERE call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE} GROUP BY policy) counted
    GROUP BY policy
    """
)


async def waiting_episodes(connection: AsyncConnection) -> dict[str, int]:
    """Return how many episodes with a reward each policy may claim; those without are missing."""
    return {row.policy: int(row.episodes) for row in await connection.execute(_WAITING)}
