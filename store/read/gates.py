"""Read the evidence of a gate: the versions of a policy, and its episodes' results by arm.

An episode belongs to the arm of its first call of the policy, even if later calls got another
version. Quarantined, deleted and evaluation episodes are left out. An episode whose first call
named its version has no arm.

An episode counts a fixed time after it began, or as soon as it has a reward: with the calls that
had ended by then, and the feedback that had come. So a later reading gives the same result. An
episode whose first call had not ended by then counts, too: leaving it out would flatter a version
that hangs. Such a call is recorded once it has ended.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at, time_of
from store.records import Arm, Record
from store.schema.tables import CLAIMABLE, CONTROL, LIVE
from store.tenants import bare, task_family
from store.values.rewards import TERMS_OF_POLICY, metric_sums_sql, rewards_sql
from store.versions import VERSION_COLUMNS, PolicyState, PolicyVersion, version_of

_GATED: Final = text(
    f"""
    SELECT DISTINCT name FROM policies
    WHERE {LIVE} AND state IN ('loaded', 'canary', 'serving') AND gate IS NOT NULL ORDER BY name
    """
)
# Newest first: of several loaded versions, the oldest is read last and remains.
_VERSIONS_IN_ROLE: Final = text(
    f"""
    SELECT {VERSION_COLUMNS}, gate, changed_at, now() AS now, frozen,
        p.frozen_at IS NOT NULL AS is_held
    FROM policies p
    JOIN (SELECT name, frozen_at IS NOT NULL AS frozen FROM policies WHERE version = 0) b
        USING (name)
    WHERE name = :name AND {LIVE} AND (state IN ('loaded', 'canary', 'serving') OR {CONTROL})
    ORDER BY version DESC
    """
)
_NEWEST_PROMOTED: Final = text(
    "SELECT COALESCE(max(version), 0) FROM policy_events"
    " WHERE name = :name AND to_state = 'serving'"
)
# An event from `serving` to `serving` says why a version stays.
_SERVED_SINCE: Final = text(
    f"""
    SELECT version FROM policy_events v WHERE name = :name AND to_state = 'serving'
        AND version NOT IN (SELECT version FROM policies WHERE name = :name AND {CONTROL})
        AND from_state IS DISTINCT FROM 'serving' AND at >= COALESCE((
            SELECT max(at) FROM policy_events b WHERE b.name = v.name AND b.to_state = 'serving'
                AND b.from_state IS DISTINCT FROM 'serving' AND b.at <= :at), :at)
    """
)
_LAST_TRAFFIC_GAIN: Final = text(
    """
    SELECT from_state, actor, evidence->>'verdict' AS verdict FROM policy_events
    WHERE name = :name AND version = :version AND to_state = 'serving'
        AND from_state IS DISTINCT FROM 'serving'
    ORDER BY id DESC LIMIT 1
    """
)
_NEXT_CONTROL: Final = text(
    f"""
    SELECT version FROM policies p
    WHERE name = :name AND version = ANY(CAST(:served AS integer[]))
        AND state = 'retired' AND {LIVE} AND ended_at IS NULL
        AND EXISTS (SELECT FROM policy_events v WHERE v.name = p.name AND v.version = p.version
            AND v.to_state = 'serving' AND v.at < :before)
    ORDER BY version > :newest, abs(version - :newest) LIMIT 1
    """
)
_NEW_EPISODES: Final = text(
    f"""
    SELECT count(*) FROM episode_policies s JOIN episodes e ON e.id = s.episode_id
    WHERE s.policy = :policy AND s.episode_id >= :first AND e.id >= :first AND {CLAIMABLE}
    """
)


class VersionInRole(Record, frozen=True, kw_only=True):
    """A version with a role in the gate: serving, canary, candidate or control.

    `since` is when the version got its state.
    """

    version: PolicyVersion
    since: datetime


class GatedPolicy(Record, frozen=True, kw_only=True):
    """A policy's versions by role, read at the database's time `now`.

    `candidate` is the oldest version that is loaded and waits. `control` is the version that
    serving ones are compared with. `frozen`: only operators change which version has traffic.
    `is_held`: no update starts from the serving version, because its rewards fell.
    """

    now: datetime
    frozen: bool
    is_held: bool
    serving: VersionInRole
    canary: VersionInRole | None = None
    candidate: VersionInRole | None = None
    control: VersionInRole | None = None


async def gated_policies(connection: AsyncConnection) -> list[str]:
    """Return the names of policies with a version that a gate decides about or watches."""
    return list((await connection.execute(_GATED)).scalars())


async def read_gated_policy(connection: AsyncConnection, name: str) -> GatedPolicy | None:
    """Return a policy's versions by role; None: no version serves, so there is no such policy."""
    rows = (await connection.execute(_VERSIONS_IN_ROLE, {"name": name})).all()
    by_state: dict[PolicyState, VersionInRole] = {
        row.state: VersionInRole(version=version_of(row), since=row.changed_at) for row in rows
    }
    if "serving" not in by_state:
        return None
    return GatedPolicy(
        now=rows[0].now,
        frozen=rows[0].frozen,
        is_held=any(row.is_held and row.state == "serving" and row.version for row in rows),
        serving=by_state["serving"],
        canary=by_state.get("canary"),
        candidate=by_state.get("loaded"),
        control=by_state.get("retired"),
    )


async def newest_promoted(connection: AsyncConnection, name: str) -> int:
    """Return the highest version of a policy that ever got the traffic; 0 if none did."""
    return int(await connection.scalar(_NEWEST_PROMOTED, {"name": name}) or 0)


async def served_since(connection: AsyncConnection, name: str, at: datetime) -> set[int]:
    """Return the versions that had the traffic at `at` or later, without the control."""
    rows = await connection.execute(_SERVED_SINCE, {"name": name, "at": at})
    return set(rows.scalars())


async def next_control(
    connection: AsyncConnection, name: str, newest: int, served: Collection[int], before: datetime
) -> int | None:
    """Return the version that becomes the next control; None if there is none.

    It is the highest of the versions `served` up to `newest`, or the lowest if all are higher. Only
    versions count that are retired, still loaded, not ended, and had the traffic before `before`.
    """
    values = {"name": name, "newest": newest, "served": list(served), "before": before}
    version: int | None = await connection.scalar(_NEXT_CONTROL, values)
    return version


async def last_traffic_gain(connection: AsyncConnection, name: str, version: int) -> Row[Any]:
    """Return how a version last got the traffic: that event's `from_state`, `actor`, `verdict`."""
    return (await connection.execute(_LAST_TRAFFIC_GAIN, {"name": name, "version": version})).one()


async def episodes_per_hour(connection: AsyncConnection, policy: str) -> float:
    """Return how many claimable episodes of a policy began per hour, over the last 24 hours."""
    now: datetime = (await connection.execute(text("SELECT now()"))).scalar_one()
    values = {"policy": policy, "first": lowest_id_at(now - timedelta(hours=24))}
    return int(await connection.scalar(_NEW_EPISODES, values) or 0) / 24


# Results of episodes by arm

# Episodes are found by their ids, which are the ids of the calls that were stored first; the few
# with another first call have an index of their own. They are sorted by their first calls, which do
# not depend on the order of storing.
_BEGUN: Final = text(
    f"""
    SELECT e.id, e.method, e.first_call_id, COALESCE(e.joined_task, e.task) AS task
    FROM episodes e
    JOIN episode_policies s ON s.episode_id = e.id AND s.policy = :policy
    WHERE (e.id >= :first AND e.id < :last
            OR e.first_call_id <> e.id AND e.first_call_id >= :first AND e.first_call_id < :last)
        AND e.first_call_id >= :first AND e.first_call_id < :last AND {CLAIMABLE}
    ORDER BY e.first_call_id LIMIT :most
    """
)
# The planner expects one row in a short range of ids, and joins thousands of episodes by nested
# loops. It knows the length of a list, unless it uses a generic plan.
_KNOW_LENGTHS: Final = text("SELECT set_config('plan_cache_mode', 'force_custom_plan', true)")
_PARTS: Final = """
    given AS (
        SELECT * FROM unnest(CAST(:episodes AS uuid[]), CAST(:methods AS text[]),
            CAST(:until AS timestamptz[])) AS g (id, method, until)),
    parts AS (
        SELECT id AS whole, id, method, until FROM given
        UNION ALL
        SELECT g.id, e.id, e.method, g.until FROM given g JOIN episodes e ON e.root = g.id)
"""
# Only an episode's own reward makes it count early: after a call's reward, others may still come.
_REWARDED: Final = text(
    f"""
    WITH {_PARTS},
    terms AS ({TERMS_OF_POLICY}),
    {metric_sums_sql("f.at < p.until")}
    SELECT whole, first_at FROM sums WHERE call_id IS NULL AND value IS NOT NULL
    """
)
# Only calls before the latest `until` are read. A call that had not ended by its episode's `until`
# counts with the time until then. If it is the first call, the episode had got no reply by then and
# counts as failed. An unfinished later call is no failure: every long episode has some.
_RESULTS: Final = text(
    f"""
    WITH {_PARTS},
    began AS (
        SELECT p.whole, t.id, t.arm, t.policy_version, t.status, t.http_status,
            t.started_at + t.total_ms * interval '1 ms' < p.until AS ended,
            LEAST(t.total_ms / 1000, extract(epoch FROM p.until - t.started_at)) AS seconds
        FROM parts p JOIN transitions t ON t.episode_id = p.id AND t.policy = :policy
            AND t.id >= :first AND t.id < :latest AND t.started_at < p.until),
    called AS (
        SELECT whole, (array_agg(arm ORDER BY id))[1] AS arm,
            (array_agg(policy_version ORDER BY id))[1] AS version,
            avg(seconds) AS seconds,
            NOT (array_agg(ended ORDER BY id))[1] OR bool_or(ended AND status <> 'client_gone'
                AND (COALESCE(http_status >= 400, true) OR status = 'truncated')) AS failed
        FROM began GROUP BY whole),
    tools AS (
        SELECT p.whole, bool_or(v.status = 'malformed') AS malformed
        FROM parts p JOIN tool_events v ON v.episode_id = p.id AND v.at < p.until
        GROUP BY p.whole),
    terms AS ({TERMS_OF_POLICY}),
    {rewards_sql("f.at < p.until")}
    SELECT b.id, c.arm, c.version, c.seconds, c.failed, t.malformed, r.value AS reward
    FROM given b LEFT JOIN called c ON c.whole = b.id
    LEFT JOIN tools t ON t.whole = b.id LEFT JOIN rewards r ON r.whole = b.id
    """
)
# A call's id is made when the call begins; clocks differ by less than this.
_ID_SKEW: Final = timedelta(days=1)
# Clocks of proxies differ by less: a call that ends up to this long after a reward still counts as
# ended before it.
CLOCK_SKEW: Final = timedelta(seconds=1)


class ArmEpisode(Record, frozen=True, kw_only=True):
    """The result of one episode for its arm.

    `version` is the version of its first call; `task` and its `family` are without the tenant.
    `reward` is None if it has none. `failed`: a request ended in an error or a truncated reply, or
    the first had not ended. `malformed`: a tool call was malformed; None without tool events.
    `seconds` is the mean duration of its calls. All fields are as of when the episode counts.
    """

    id: UUID
    began: datetime
    arm: Arm | None
    version: int | None
    task: str | None
    family: str
    reward: float | None
    failed: bool | None
    malformed: bool | None
    seconds: float | None


async def begun_episodes(
    connection: AsyncConnection, policy: str, first: UUID, until: datetime, most: int
) -> Sequence[Row[Any]]:
    """Return the episodes of a policy whose first call is from the id `first` to before `until`.

    They are sorted by first call, and at most `most`. A row has `id`, `method`, `first_call_id`,
    and the `task` as stored.
    """
    values = {"policy": policy, "first": first, "last": lowest_id_at(until), "most": most}
    return (await connection.execute(_BEGUN, values)).all()


async def arm_episodes(
    connection: AsyncConnection,
    policy: str,
    begun: Iterable[Row[Any]],
    *,
    until: datetime,
    within: timedelta,
    soon: bool,
) -> list[ArmEpisode]:
    """Return the results of those of `begun` that count before `until`, by when they count.

    Episodes without an arm are included. All feedback from before `until` must be stored. Calls and
    feedback later than `within` after an episode's beginning do not count. If `soon`, an episode
    counts once it has a reward; otherwise after `within`.
    """
    known = {row.id: row for row in begun}
    if not known:
        return []

    def values(ends: Mapping[UUID, datetime]) -> dict[str, Any]:
        methods = [known[one].method for one in ends]
        until = list(ends.values())
        return {"policy": policy, "episodes": list(ends), "methods": methods, "until": until}

    await connection.execute(_KNOW_LENGTHS)
    began = {row.id: time_of(row.first_call_id) for row in known.values()}
    counts_at = latest = {one: start + within for one, start in began.items()}
    if soon:
        ends = {one: min(end, until) for one, end in latest.items()}
        rewarded = (await connection.execute(_REWARDED, values(ends))).all()
        counts_at = latest | {
            one: min(max(first, began[one]), latest[one]) for one, first in rewarded
        }
    counted = {
        one: min(at + CLOCK_SKEW, latest[one]) for one, at in counts_at.items() if at < until
    }
    if not counted:
        return []
    bounds = {
        "first": min(known[one].first_call_id for one in counted),
        "latest": lowest_id_at(max(counted.values()) + _ID_SKEW),
    }
    rows = await connection.execute(_RESULTS, values(counted) | bounds)
    tasks = {one: row.task and bare(row.task) for one, row in known.items()}
    episodes = [
        ArmEpisode(
            began=began[row.id],
            task=tasks[row.id],
            family=task_family(tasks[row.id]),
            **row._mapping,
        )
        for row in rows
    ]
    return sorted(episodes, key=lambda one: (counts_at[one.id], known[one.id].first_call_id))
