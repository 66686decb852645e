"""Count the newest calls and episodes, which show why a policy learns or does not.

Only the newest records are counted, so that a read takes as long with a million calls as with a
thousand.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.read.browsing import ID_SKEW, IS_OF_TENANT
from store.records import EVAL, Record, Split
from store.schema.tables import SPLIT

# Limits of what is read: time, calls, and episodes of a policy.
WINDOW: Final = timedelta(days=7)
MOST_CALLS: Final = 2000
MOST_EPISODES: Final = 1000
# A tenant's calls are read from this many of its newest episodes, and this many calls of each.
MOST_TENANT_EPISODES: Final = 500
MOST_EPISODE_CALLS: Final = 200
# Most counts of calls that are returned: clients may request models of any name.
MOST_CALL_COUNTS: Final = 50
# An episode without a call for this long is over, and its reward should have come.
ENDED_AFTER: Final = timedelta(minutes=10)

_OWN_CALLS: Final = f"""
    (SELECT e.id FROM episodes e WHERE e.id >= :begun AND {IS_OF_TENANT}
        ORDER BY e.id DESC LIMIT :own) own
    CROSS JOIN LATERAL (SELECT * FROM transitions c WHERE c.episode_id = own.id
        ORDER BY c.started_at DESC LIMIT {MOST_EPISODE_CALLS}) t"""
_CALLS: Final = f"""
    WITH newest AS MATERIALIZED (
        SELECT t.policy, t.served_model, t.reason, t.http_status, t.split, t.started_at
        FROM {{calls}} WHERE t.id >= :first ORDER BY t.id DESC LIMIT :most)
    SELECT n.policy, CASE WHEN n.policy IS NULL THEN n.served_model END AS model, n.reason,
        n.http_status, n.split, count(*) AS calls, min(n.started_at) AS first_at,
        max(n.started_at) AS last_at
    FROM newest n
    GROUP BY 1, 2, 3, 4, 5 ORDER BY calls DESC, 1, 2, 3, 4, 5 LIMIT {MOST_CALL_COUNTS}
"""
# The lock is that of `store.claims.hold_policy`; `pg_locks` has its bigint key in two halves.
_POLICIES: Final = text(
    """
    SELECT b.name, b.served_name AS base, b.tenant, b.frozen_at, b.created_at,
        (SELECT claimed_at FROM updates WHERE policy = b.name AND state = 'running')
            AS running_since,
        (SELECT claimed_at FROM updates WHERE policy = b.name AND version IS NOT NULL
            ORDER BY claimed_at DESC LIMIT 1) AS trained_at,
        EXISTS (SELECT FROM pg_locks l
            WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
                AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND l.classid::bigint << 32 | l.objid::bigint
                    = hashtext('pawl-trainer:' || b.name)) AS is_held
    FROM policies b
    WHERE b.version = 0 AND (CAST(:tenant AS text) IS NULL OR b.tenant = :tenant)
    ORDER BY b.name
    """
)
_EPISODES: Final = text(
    f"""
    WITH newest AS MATERIALIZED (
        SELECT episode_id, task, scored_at, call_scored_at, reward, failed, last_call_at
        FROM episode_policies WHERE policy = :policy AND episode_id >= :first
        ORDER BY episode_id DESC LIMIT {MOST_EPISODES}),
    wholes AS (
        SELECT n.*, e.quarantined_reason,
            COALESCE(n.scored_at, CASE WHEN CAST(:calls_are_paid AS boolean)
                THEN n.call_scored_at END) AS paid_at,
            n.last_call_at < now() - CAST(:over AS interval) AS is_silent
        FROM newest n JOIN episodes e ON e.id = n.episode_id
        WHERE e.root IS NULL AND e.deleted_at IS NULL AND {SPLIT} <> '{EVAL}'),
    counted AS (SELECT * FROM wholes WHERE quarantined_reason IS NULL),
    tasks AS (
        SELECT count(*) AS members, count(DISTINCT reward) > 1 AS differs,
            count(*) > 1 AS is_group
        FROM counted WHERE paid_at IS NOT NULL AND task IS NOT NULL GROUP BY task)
    SELECT count(*) AS episodes, min(last_call_at) AS first_at,
        count(*) FILTER (WHERE paid_at IS NOT NULL) AS scored,
        count(*) FILTER (WHERE is_silent OR paid_at IS NOT NULL) AS ended,
        min(last_call_at) FILTER (WHERE paid_at IS NULL) AS unscored_since,
        min(paid_at) AS scored_since,
        min(reward) FILTER (WHERE paid_at IS NOT NULL) AS least,
        max(reward) FILTER (WHERE paid_at IS NOT NULL) AS most,
        (SELECT count(*) FROM tasks) AS tasks,
        (SELECT max(members) FROM tasks) AS largest_group,
        (SELECT count(*) FROM tasks WHERE is_group) AS groups,
        (SELECT count(*) FROM tasks WHERE is_group AND differs) AS groups_that_differ,
        (SELECT COALESCE(sum(members), 0)::integer FROM tasks WHERE is_group AND NOT differs)
            AS alike,
        (SELECT count(*) FROM wholes WHERE quarantined_reason IS NOT NULL) AS quarantined,
        (SELECT min(last_call_at) FROM wholes WHERE quarantined_reason IS NOT NULL)
            AS quarantined_since,
        (SELECT mode() WITHIN GROUP (ORDER BY quarantined_reason) FROM wholes) AS quarantined_as
    FROM counted
    """
)
_CHANGED: Final = text(
    "SELECT served_name FROM policies"
    " WHERE name = :name AND changed_at > now() - CAST(:settled AS interval)"
)


# Feedback without a stored target, from within the window and older than `ENDED_AFTER`.
_UNMATCHED: Final = text(
    f"""
    SELECT count(*) AS statements, min(n.at) AS since,
        (array_agg(n.target_kind ORDER BY n.at DESC))[1] AS kind,
        (array_agg(n.target ORDER BY n.at DESC))[1] AS target
    FROM (SELECT * FROM feedback ORDER BY id DESC LIMIT {MOST_CALLS}) n
    WHERE n.episode_id IS NULL
        AND n.at > now() - CAST(:window AS interval) AND n.at < now() - CAST(:over AS interval)
        AND {IS_OF_TENANT.replace("e.key", "n.target")}
    """
)


class UnmatchedFeedback(Record, frozen=True, kw_only=True):
    """Feedback about unrecorded targets: how many `statements`, and the newest's target."""

    statements: int = 0
    since: datetime | None = None
    kind: str | None = None
    target: str | None = None


class CallCount(Record, frozen=True, kw_only=True):
    """How many of the newest calls ended in the same way.

    `reason` says why they cannot be trained on; None: they can be. `model` is the
    model name sent to the upstream if no policy answered.
    """

    policy: str | None
    model: str | None
    reason: str | None
    http_status: int | None
    split: Split
    calls: int
    first_at: datetime
    last_at: datetime


class BegunPolicy(Record, frozen=True, kw_only=True):
    """A policy, and the state of its training.

    `is_held`: a trainer works on it now. `trained_at` is when the last update that made a version
    was claimed.
    """

    name: str
    base: str
    tenant: str
    created_at: datetime
    is_held: bool
    frozen_at: datetime | None = None
    running_since: datetime | None = None
    trained_at: datetime | None = None


class EpisodeCounts(Record, frozen=True, kw_only=True):
    """Counts of a policy's newest training episodes: scored, ended, alike, quarantined.

    Quarantined episodes are counted by the last three fields only.

    `ended` have a reward, or had no call for `ENDED_AFTER`. `groups` are tasks with several scored
    episodes, of which `groups_that_differ` have different rewards; `alike` counts the episodes of
    groups with equal rewards.
    """

    episodes: int = 0
    first_at: datetime | None = None
    scored: int = 0
    ended: int = 0
    unscored_since: datetime | None = None
    scored_since: datetime | None = None
    least: float | None = None
    most: float | None = None
    tasks: int = 0
    largest_group: int | None = None
    groups: int = 0
    groups_that_differ: int = 0
    alike: int = 0
    quarantined: int = 0
    quarantined_since: datetime | None = None
    quarantined_as: str | None = None


async def count_newest_calls(
    connection: AsyncConnection, now: datetime, tenant: str | None = None
) -> list[CallCount]:
    """Count the newest calls of the last `WINDOW` by how they ended, the most frequent first.

    With `tenant`, the calls of this tenant's newest episodes are counted.
    """
    first = lowest_id_at(now - WINDOW)
    sql = "transitions t" if tenant is None else _OWN_CALLS
    values = {"tenant": tenant, "first": first, "begun": UUID(int=first.int - ID_SKEW)}
    rows = await connection.execute(
        text(_CALLS.format(calls=sql)), {**values, "most": MOST_CALLS, "own": MOST_TENANT_EPISODES}
    )
    return [CallCount(**row._mapping) for row in rows]


async def count_unmatched_feedback(
    connection: AsyncConnection, tenant: str | None = None
) -> UnmatchedFeedback:
    """Count feedback of the last `WINDOW`, older than `ENDED_AFTER`, about unrecorded targets."""
    values = {"tenant": tenant, "window": WINDOW, "over": ENDED_AFTER}
    return UnmatchedFeedback(**(await connection.execute(_UNMATCHED, values)).one()._mapping)


async def begun_policies(
    connection: AsyncConnection, tenant: str | None = None
) -> list[BegunPolicy]:
    """Return the policies that a trainer ever began, by name; with `tenant`, this tenant's."""
    rows = await connection.execute(_POLICIES, {"tenant": tenant})
    return [BegunPolicy(**row._mapping) for row in rows]


async def episode_counts(
    connection: AsyncConnection,
    policy: str,
    now: datetime,
    *,
    calls_are_paid: bool,
) -> EpisodeCounts:
    """Count those of a policy's newest `MOST_EPISODES` episodes that began within the `WINDOW`.

    If `calls_are_paid`, the reward of a call makes its episode scored.
    """
    values: Mapping[str, Any] = {
        "policy": policy,
        "first": lowest_id_at(now - WINDOW),
        "over": ENDED_AFTER,
        "calls_are_paid": calls_are_paid,
    }
    return EpisodeCounts(**(await connection.execute(_EPISODES, values)).one()._mapping)


async def recently_changed_versions(
    connection: AsyncConnection, policy: str, settled: timedelta
) -> set[str]:
    """Return the names of the policy's versions whose state changed less than `settled` ago."""
    values = {"name": policy, "settled": settled}
    return set((await connection.execute(_CHANGED, values)).scalars())
