"""Select the episodes for a policy's next update: the freshest first, in groups or singly.

Episodes of one task are a group. A group is ready once it has `group_size` members, or has waited
for `max_age_s`. An episode without a task is ready at once. So is the only episode of its task,
unless this policy's tasks often repeat: then it waits for others of its task like any group.

Episodes with the latest reward (by the minute) come first, whatever version sampled them: a long
episode began with an older version than short ones, and must not be left over for that. Within a
minute newer versions come first; among equals, the episodes that waited longest. If more episodes
arrive than are trained, those with the oldest rewards are left over.

A group whose final rewards are all equal teaches little, as it is compared only with its family. It
has no signal, and does not start an update: such groups are taken along with others, or once they
fill a whole update. A learner that imitates successes waits for groups with a success instead
(docs/decisions/018-groups.md).

Three kinds of episodes are not selected: episodes that a faulty model server sampled, which expire
like others that wait too long (docs/decisions/053-pause-after-failures.md); episodes with a call of
a rolled-back version, which may have exploited a flaw of the reward; and episodes that only
untrusted judges have scored (`store.read.agreement`).

Stale episodes, such as most of the control's, are members of their group: they count towards its
size and its comparison, and are consumed untrained.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.read.agreement import trust_in_judges
from store.records import Record
from store.schema.tables import FREE, HAD_TRAFFIC
from store.settings import MAX_INT32
from store.values.rewards import TERMS_OF_POLICY

# Number of the last updates that are searched for members to compare a late member with.
EARLIER_UPDATES = 32


class ClaimRule(Record, frozen=True, kw_only=True):
    """The rule for when a group is complete, and when an update has enough episodes.

    A group of `group_size` scored episodes is complete. `max_age_s` seconds after its first reward
    a smaller group is complete, too, filled up with members that earlier updates consumed. With a
    `group_size` of 1 every episode is ready by itself, with or without a task.

    An update starts once groups with a signal have `fewest` episodes. It takes as many episodes as
    fill `groups` groups (`most_groups` if it had to wait for a slot; None: `groups`), and up to as
    many again from groups without a signal. Groups without a signal start an update of their own
    only once they fill `groups` groups.

    With `needs_spread` a group has a signal if its rewards differ, and so has a single episode,
    which is compared with its family. Each episode's newest reward is compared, and `failed_reward`
    for failed episodes without a reward. With `least_reward` a group has a signal if a member has
    at least this reward; such members are taken first.

    Two kinds of episodes count as members after a time of silence (None: never): a failed episode
    without a reward, after `failed_after_s` seconds; and an episode that only has rewards for
    single calls, `call_rewards_after_s` seconds after its last call or such reward. Episodes
    sampled more than `max_staleness` versions ago are stale (None: none are): they fill groups with
    fresh ones, and expire after `max_age_s` (`store.claims`).

    With `finished_after_s` no reward is needed: an episode without a reward counts as a member
    after this many seconds of silence.
    """

    policy: str
    group_size: int
    groups: int
    max_age_s: float
    max_staleness: int | None = None
    failed_after_s: float | None = None
    call_rewards_after_s: float | None = None
    needs_spread: bool = False
    failed_reward: float | None = None
    fewest: int = 32
    most_groups: int | None = None
    least_reward: float | None = None
    finished_after_s: float | None = None

    @property
    def full_update_size(self) -> int:
        """Return the number of episodes that fill `groups` groups."""
        return self.groups * self.group_size

    @property
    def episodes_needed(self) -> int:
        """Return how many episodes in groups with a signal must wait before an update starts."""
        return min(self.fewest, self.full_update_size)


_SCORED = f"""
    SELECT episode_id AS id, task, version, scored_at AS at, reward, false AS failed,
        version >= :oldest AS is_fresh
    FROM episode_policies
    WHERE policy = :policy AND scored_at IS NOT NULL AND {FREE}
"""
# A reward for a single call does not end an episode: it counts as over once all parts are silent.
# This query does not know which calls' rewards will be compared.
_CALL_SCORED = f"""
    UNION ALL
    SELECT episode_id, task, version, GREATEST(last_call_at, call_scored_at)
        + make_interval(secs => :call_rewards_after_s), reward, false, version >= :oldest
    FROM episode_policies
    WHERE policy = :policy AND call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE}
        AND GREATEST(last_call_at, call_scored_at)
            < now() - make_interval(secs => :call_rewards_after_s)
"""
# If rewards for single calls count, an episode that has one counts as rewarded.
_FAILED = f"""
    UNION ALL
    SELECT episode_id, task, version, last_call_at + make_interval(secs => :failed_after_s),
        CAST(:failed_reward AS double precision), true, version >= :oldest
    FROM episode_policies
    WHERE policy = :policy AND failed AND scored_at IS NULL AND {FREE}
        AND NOT (:calls_are_paid AND call_scored_at IS NOT NULL)
        AND last_call_at < now() - make_interval(secs => :failed_after_s)
"""
_FINISHED = f"""
    UNION ALL
    SELECT episode_id, task, version, last_call_at + make_interval(secs => :finished_after_s),
        CAST(NULL AS double precision), failed, version >= :oldest
    FROM episode_policies
    WHERE policy = :policy AND scored_at IS NULL AND {FREE}
        AND last_call_at < now() - make_interval(secs => :finished_after_s)
"""
# Members of each task that the policy's last updates before a given time consumed. OFFSET 0 makes
# the planner look each update up: otherwise it would read all consumptions.
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
# If at least this share of a policy's waiting and lately consumed episodes has a task in common
# with another, an episode that is alone waits for others of its task.
_REPEATING_SHARE = 0.1
_ORDER = "date_trunc('minute', last) DESC, newest DESC, first, task, ids[1]"
# A failed episode is never the best of its group. A task with more members than a group has several
# groups: fresh members fill the first ones. An episode without a task is a group by itself.
_GROUPS = f"""
    WITH ready AS ({{ready}}),
    consumed AS (
        SELECT task, count(*) AS members, max(reward) AS most, min(COALESCE(reward, CASE
            WHEN failed THEN CAST(:failed_reward AS double precision) END)) AS least
        FROM ({{earlier}}) e
        GROUP BY task),
    numbered AS (
        SELECT id, {{task}} AS task, version, at, reward, failed, is_fresh, row_number() OVER (
            PARTITION BY {{task}}
            ORDER BY is_fresh DESC, {{best}}date_trunc('minute', at) DESC, version DESC, at, id
        ) AS place
        FROM ready),
    found AS (
        SELECT task, count(*) AS members, min(at) FILTER (WHERE is_fresh) AS first,
            max(version) AS newest, max(at) AS last, min(reward) AS least,
            max(reward) FILTER (WHERE NOT failed) AS most,
            max(reward) FILTER (WHERE is_fresh) AS fresh_most, array_agg(id ORDER BY place) AS ids
        FROM numbered
        GROUP BY task, (place - 1) / CAST(:group_size AS integer),
            CASE WHEN task IS NULL THEN id END
        HAVING bool_or(is_fresh)),
    tasks AS (
        SELECT sum(members) AS members FROM (
            SELECT task, members FROM consumed
            UNION ALL SELECT task, members FROM found WHERE task IS NOT NULL) counted
        GROUP BY task),
    complete AS (
        SELECT task, newest, first, last, ids, g.members, COALESCE({{signal}}, false) AS has_signal
        FROM found g LEFT JOIN consumed c USING (task)
        WHERE g.members >= :group_size OR task IS NULL
            OR first < now() - make_interval(secs => :max_age_s)
            OR (g.members = 1 AND (
                SELECT COALESCE(sum(members) FILTER (WHERE members > 1), 0)
                    < {_REPEATING_SHARE} * sum(members) FROM tasks)))
    SELECT ids, members, has_signal
    FROM (SELECT *,
              sum(members) OVER (PARTITION BY has_signal ORDER BY {_ORDER}) - members AS before
          FROM complete) placed
    WHERE before < :most ORDER BY {_ORDER}
"""
# Conditions for a signal, by the rewards of waiting members (g) and of members consumed earlier
# (c), which a short group is compared with, too.
_ANY_SIGNAL = "true"
_SPREAD = """CASE WHEN g.members = 1 AND c.members IS NULL THEN true
                WHEN g.members >= :group_size THEN g.least < g.most
                ELSE LEAST(g.least, c.least) < GREATEST(g.most, c.most) END"""
_SUCCESS = "g.fresh_most >= :least_reward"
# Members of a task with at least `least_reward` come first.
_BEST_FIRST = "COALESCE(reward >= :least_reward, false) DESC, "
# This waits for transactions that hold a member (SKIP LOCKED would claim a group that is not
# whole). Locks are taken in the order of keys, as everywhere, so that there are no deadlocks.
_LOCK = text("SELECT FROM episodes WHERE id = ANY(:ids) ORDER BY key FOR NO KEY UPDATE")
# A separate statement: the locking one would see the claims as they were before it waited.
_FREE = text(
    "SELECT episode_id FROM episode_policies"
    f" WHERE policy = :policy AND episode_id = ANY(:ids) AND {FREE}"
)


async def lock_ready_episodes(
    connection: AsyncConnection, rule: ClaimRule, oldest: int, *, takes_most: bool = False
) -> list[UUID]:
    """Select and lock the episodes of the next update; return [] while there are too few.

    `oldest` is the lowest version whose episodes may be trained. With `takes_most` up to
    `rule.most_groups` groups are selected.
    """
    groups = (takes_most and rule.most_groups) or rule.groups
    ready = await _ready_groups(connection, rule, oldest, groups * rule.group_size)
    ids = [episode_id for group in chosen_groups(ready, rule) for episode_id in group.ids]
    free = await lock_free_episodes(connection, rule.policy, ids) if ids else set[UUID]()
    return [episode_id for episode_id in ids if episode_id in free]


def chosen_groups(rows: Sequence[Any], rule: ClaimRule) -> Sequence[Any]:
    """Return the ready groups `rows` that an update takes now; [] while there are too few."""
    if sum(row.members for row in rows if row.has_signal) >= rule.episodes_needed:
        return rows
    without = [row for row in rows if not row.has_signal]
    return without if sum(row.members for row in without) >= rule.full_update_size else []


async def _ready_groups(
    connection: AsyncConnection, rule: ClaimRule, oldest: int, most: int
) -> Sequence[Any]:
    """Return ready groups in order: up to `most` episodes with a signal, and as many without."""
    # A rule that needs no reward does not depend on judges.
    needs_reward = rule.finished_after_s is None
    trust = await trust_in_judges(connection, rule.policy) if needs_reward else {}
    untrusted = [source for source, share in trust.items() if not share]
    values = msgspec.structs.asdict(rule) | {
        "untrusted": untrusted,
        "oldest": oldest,
        "most": most,
        "before": await connection.scalar(text("SELECT now()")),
        "calls_are_paid": rule.call_rewards_after_s is not None,
    }
    members = (
        (_SCORED, True),
        (_CALL_SCORED, rule.call_rewards_after_s is not None),
        (_FAILED, rule.failed_after_s is not None),
        (_FINISHED, rule.finished_after_s is not None),
    )
    exclusions = await _exclusions(connection, rule.policy, untrusted)
    signal = _SPREAD if rule.needs_spread else _ANY_SIGNAL
    query = _GROUPS.format(
        ready="".join(part + exclusions for part, counts in members if counts),
        earlier=_EARLIER,
        task="task" if rule.group_size > 1 else "CAST(NULL AS text)",
        best="" if rule.least_reward is None else _BEST_FIRST,
        signal=signal if rule.least_reward is None else _SUCCESS,
    )
    return (await connection.execute(text(query), values)).all()


async def lock_episodes(connection: AsyncConnection, ids: Sequence[UUID]) -> None:
    """Lock these episodes, and so their claims by any policy, until the transaction ends."""
    await connection.execute(_LOCK, {"ids": list(ids)})


async def lock_free_episodes(
    connection: AsyncConnection, policy: str, ids: Sequence[UUID]
) -> set[UUID]:
    """Lock these episodes, and return those that `policy` may claim and has not claimed."""
    await lock_episodes(connection, ids)
    values = {"policy": policy, "ids": list(ids)}
    return set((await connection.execute(_FREE, values)).scalars())


# Episodes that are not selected

# A condition on rows of `episode_policies`. An episode's id is that of its first stored call, so
# comparing it limits the time at which it began.
OUTSIDE_FAULT_TIMES: Final = """
    NOT EXISTS (
        SELECT FROM fault_times f
        WHERE f.policy = :policy AND last_call_at >= f.called_since AND episode_id < f.began_before)
"""
# Episodes claimed for the last version that went live, or ended before that claim, count as sound.
_ADD_FAULT_TIME: Final = text(
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
_IN_FAULT_TIMES: Final = text(
    f"SELECT count(*) FROM episode_policies WHERE policy = :policy AND {FREE}"
    f" AND NOT ({OUTSIDE_FAULT_TIMES})"
)


# How long after a version was unloaded its calls may still be stored, in episodes that began with
# another version.
_CALLS_ARRIVE_WITHIN: Final = "interval '1 hour'"
# The row has an episode's lowest and highest version. Only its calls tell whether it also used a
# version in between, which it left when that was unloaded.
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
# First, by index, episodes that began with a rolled-back version. Then episodes that moved to it
# from an older version: only while more may come, as this reads all free ones of older versions.
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
                AND (lost.unloaded_at IS NULL OR lost.changed_at > now() - {_CALLS_ARRIVE_WITHIN}))
        AND {HAS_ROLLED_BACK}
    LIMIT :most
    """
)
# Begins the condition for an episode with a reward that meets a further condition.
_REWARD_WHERE: Final = f"""EXISTS (
        SELECT FROM feedback f JOIN episodes part ON part.id = f.episode_id
        WHERE (part.id = episode_policies.episode_id OR part.root = episode_policies.episode_id)
            AND f.metric IN (SELECT metric FROM ({TERMS_OF_POLICY}) terms) AND"""
# The condition for an episode that has rewards of untrusted judges only.
_UNTRUSTED: Final = f"""({_REWARD_WHERE} f.source = ANY(CAST(:untrusted AS text[])))
    AND NOT {_REWARD_WHERE} (f.value IS NOT NULL OR f.label IS NOT NULL)
        AND (f.source IS NULL OR f.source <> ALL(CAST(:untrusted AS text[])))))
"""
_HAD_FAULTS: Final = text("SELECT EXISTS (SELECT FROM fault_times WHERE policy = :policy)")
_HAD_ROLL_BACKS: Final = text(
    "SELECT EXISTS (SELECT FROM policies WHERE name = :policy AND state = 'rolled_back')"
)


async def _exclusions(connection: AsyncConnection, policy: str, untrusted: Sequence[str]) -> str:
    """Return SQL conditions that exclude the rows of `episode_policies` that must not be selected.

    The text is empty if no server was ever at fault, no version was rolled back, and all judges are
    trusted.
    """
    values = {"policy": policy}
    faults = await connection.scalar(_HAD_FAULTS, values)
    rolled_back = await connection.scalar(_HAD_ROLL_BACKS, values)
    excluded = [HAS_ROLLED_BACK] * bool(rolled_back) + [_UNTRUSTED] * bool(untrusted)
    return (f" AND {OUTSIDE_FAULT_TIMES}" if faults else "") + "".join(
        f" AND NOT {condition}" for condition in excluded
    )


async def exclude_after_fault(connection: AsyncConnection, policy: str) -> int:
    """Keep updates from claiming episodes that a model server's past fault may have spoilt.

    Such an episode began before now, and had a call after the claim of the last update whose
    version went live. Return how many unclaimed episodes are excluded, for earlier faults too.
    """
    now = (await connection.execute(text("SELECT now()"))).scalar_one()
    await connection.execute(_ADD_FAULT_TIME, {"policy": policy, "began_before": lowest_id_at(now)})
    return int((await connection.execute(_IN_FAULT_TIMES, {"policy": policy})).scalar_one())


async def rolled_back_episodes(connection: AsyncConnection, policy: str, most: int) -> list[UUID]:
    """Return up to `most` unclaimed episodes with a call of a version that was rolled back."""
    values: dict[str, Any] = {"policy": policy, "most": most}
    if not await connection.scalar(_HAD_ROLL_BACKS, values):
        return []
    return list((await connection.execute(_TO_EXPIRE, values)).scalars())


# Waiting episodes


async def waiting_updates(connection: AsyncConnection, rule: ClaimRule) -> float:
    """Return how many updates the waiting episodes with a signal would fill."""
    ready = await _ready_groups(connection, rule, 0, MAX_INT32)
    return float(sum(row.members for row in ready if row.has_signal)) / rule.episodes_needed


# One count for each of two partial indexes, which hold little more than the counted rows.
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
    """Return how many episodes with a reward each policy may claim; policies with 0 are missing."""
    return {row.policy: int(row.episodes) for row in await connection.execute(_WAITING)}
