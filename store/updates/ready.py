"""Say which episodes are ready for a policy's next update: complete groups, the freshest first.

Those whose reward is of the latest minute come first, whatever version sampled them: an episode of
half an hour began with an older one than those of two minutes, and must not be left over for that.
Within a minute newer versions come first; among equals, those that waited longest. If more episodes
arrive than are trained, those that have waited longer than others are left over.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.records import Record
from store.schema.claimable import FREE, minute_of

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
    than `max_staleness` versions ago are not taken; these, and those silent for more than
    `max_episode_age_s` seconds, expire (`store.updates.expiry`). None: no limit.
    """

    policy: str
    group_size: int
    groups: int
    smallest_group: int
    max_age_s: float
    max_staleness: int | None = None
    max_episode_age_s: float | None = None
    failed_after_s: float | None = None
    call_rewards_after_s: float | None = None
    needs_spread: bool = False
    failed_reward: float | None = None
    most_groups: int | None = None
    least_reward: float | None = None


_SCORED = f"""
    SELECT episode_id AS id, task, version, scored_at AS at, reward
    FROM episode_policies
    WHERE policy = :policy AND scored_at IS NOT NULL AND {FREE} AND version >= :oldest
"""
# No reward marks the end of such an episode, so it counts as over once all its parts are silent.
# Which of its calls' rewards are compared is not known here.
_CALL_SCORED = f"""
    UNION ALL
    SELECT episode_id, task, version, GREATEST(last_call_at, call_scored_at)
        + make_interval(secs => :call_rewards_after_s), reward
    FROM episode_policies
    WHERE policy = :policy AND call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE}
        AND GREATEST(last_call_at, call_scored_at)
            < now() - make_interval(secs => :call_rewards_after_s)
        AND version >= :oldest
"""
# If rewards for single calls count, an episode that has one counts as rewarded.
_FAILED = f"""
    UNION ALL
    SELECT episode_id, task, version, last_call_at + make_interval(secs => :failed_after_s),
        CAST(:failed_reward AS double precision)
    FROM episode_policies
    WHERE policy = :policy AND failed AND scored_at IS NULL AND {FREE}
        AND NOT (:calls_are_paid AND call_scored_at IS NOT NULL)
        AND last_call_at < now() - make_interval(secs => :failed_after_s)
        AND version >= :oldest
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
        SELECT task, count(*) AS members, min(at) AS first, max(version) AS newest,
            min(reward) AS least, max(reward) AS most, max(at) AS last
        FROM ready WHERE task IS NOT NULL GROUP BY task),
    complete AS (
        SELECT task, newest, first, last, COALESCE(c.members, 0) AS earlier,
            COALESCE({{signal}}, false) AS has_signal
        FROM found g LEFT JOIN consumed c USING (task)
        WHERE g.members >= :group_size
            OR (g.members + COALESCE(c.members, 0) >= :smallest_group
                AND first < now() - make_interval(secs => :max_age_s)))
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
        ORDER BY {{best}}{minute_of("at")} DESC, version DESC, at, id LIMIT :group_size) m
"""
_SINGLES = f"""
    SELECT id, extract(epoch FROM now() - at) AS age_s, {{has_signal}} AS has_signal
    FROM ({{ready}}) r WHERE {{condition}}
    ORDER BY {minute_of("at")} DESC, version DESC, at, id LIMIT :groups
"""
# What makes a group count, of the rewards of those that wait (g) and those consumed earlier (c).
_ANY_SIGNAL = "true"
_SPREAD = """CASE WHEN g.members >= :group_size THEN g.least < g.most
                ELSE LEAST(g.least, c.least) < GREATEST(g.most, c.most) END"""
_SUCCESS = "g.most >= :least_reward"
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


class Backlog:
    """The groups that wait for a policy, without the episodes set aside, in one transaction."""

    def __init__(
        self, connection: AsyncConnection, rule: ClaimRule, but: str, values: dict[str, Any]
    ) -> None:
        """Build the query of waiting episodes; `but` ends each part of it."""
        self._connection = connection
        self._rule = rule
        self._ready, of_rule = _ready_of(rule, but)
        self._values = values | of_rule

    async def first(self) -> Sequence[Any]:
        """Return the first groups with and without signal, in order."""
        rule = self._rule
        if rule.group_size == 1:
            query, limits = _singles_of(rule, self._ready), dict[str, Any]()
        else:
            limits = {
                "before": await self._connection.scalar(text("SELECT now()")),
                "group_size": rule.group_size,
                "smallest_group": rule.smallest_group,
                "max_age_s": rule.max_age_s,
                "failed_reward": rule.failed_reward,
            }
            signal = _signal_of(rule)
            query = text(_GROUPS.format(ready=self._ready, earlier=_EARLIER, signal=signal))
        return (await self._connection.execute(query, self._values | limits)).all()

    async def lock_members(self, groups: Sequence[Any]) -> list[UUID]:
        """Lock the first members of groups; return the free ones, of groups that still suffice."""
        if self._rule.group_size == 1:
            members = [([row.id], 0) for row in groups]
        else:
            by_task = await self._members([row.task for row in groups])
            members = [(by_task.get(row.task, []), row.earlier) for row in groups]
        wanted = [id_ for ids, _ in members for id_ in ids]
        free = await lock_free(self._connection, self._rule.policy, wanted)
        fewest = min(self._rule.smallest_group, self._rule.group_size)
        taken: list[UUID] = []
        for ids, earlier in members:
            still_free = [id_ for id_ in ids if id_ in free]
            if still_free and len(still_free) + earlier >= fewest:
                taken += still_free
        return taken

    async def _members(self, tasks: Sequence[str]) -> dict[str, list[UUID]]:
        best = "" if self._rule.least_reward is None else _BEST_FIRST
        rows = await self._connection.execute(
            text(_MEMBERS.format(ready=self._ready, best=best)),
            self._values | {"tasks": list(tasks), "group_size": self._rule.group_size},
        )
        members: dict[str, list[UUID]] = {}
        for row in rows:
            members.setdefault(row.task, []).append(row.id)
        return members


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
