"""Read what a gate decides by: where a policy stands, and what its episodes came to, arm by arm.

An episode belongs to the arm that its first call of the policy was given, whatever it went on with.
Left out are those that are quarantined or deleted, evaluation, and those that began with a call
that names its version: none of these were given to an arm by chance.

An episode counts a fixed time after it began, or as soon as its reward is there: with the calls
that had ended by then, and what was said of it by then. So whoever reads it later reads the same.
One whose first call had not ended by then counts as well: leaving it out would flatter a
version that hangs. The record of such a call is there once it has ended, since a call is recorded
as it ends.
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
from store.values.rewards import TERMS_OF_POLICY, rewards, sums
from store.versions import VERSION_COLUMNS, PolicyState, PolicyVersion, version_of

_GATED: Final = text(
    f"""
    SELECT DISTINCT name FROM policies
    WHERE {LIVE} AND state IN ('loaded', 'canary', 'serving') AND gate IS NOT NULL ORDER BY name
    """
)
# The oldest of those that are loaded comes last.
_STANDING: Final = text(
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
_LAST_GIVEN: Final = text(
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


class Standing(Record, frozen=True, kw_only=True):
    """Describe a version that has a part in a comparison.

    `gate` is the rule of the recipe that made it, None if it has none; `since` is when it got its
    state.
    """

    version: PolicyVersion
    gate: Mapping[str, Any] | None
    since: datetime


class Gated(Record, frozen=True, kw_only=True):
    """Describe a policy at the time `now` of the database: of each part one version at most.

    `candidate` is the oldest version that is loaded and waits, `control` the one that what served
    since it lost the traffic is compared with. `frozen` says that only operators change which
    version has traffic, and `is_held` that nothing is trained on what serves.
    """

    now: datetime
    frozen: bool
    is_held: bool
    serving: Standing
    canary: Standing | None = None
    candidate: Standing | None = None
    control: Standing | None = None


async def gated_policies(connection: AsyncConnection) -> list[str]:
    """Return the policies with a version that a rule decides about, or watches, by name."""
    return list((await connection.execute(_GATED)).scalars())


async def gated(connection: AsyncConnection, name: str) -> Gated | None:
    """Return where a policy stands, or None if no version of it serves: there is no such policy."""
    rows = (await connection.execute(_STANDING, {"name": name})).all()
    by_state: dict[PolicyState, Standing] = {
        row.state: Standing(version=version_of(row), gate=row.gate, since=row.changed_at)
        for row in rows
    }
    if "serving" not in by_state:
        return None
    return Gated(
        now=rows[0].now,
        frozen=rows[0].frozen,
        is_held=any(row.is_held and row.state == "serving" and row.version for row in rows),
        serving=by_state["serving"],
        canary=by_state.get("canary"),
        candidate=by_state.get("loaded"),
        control=by_state.get("retired"),
    )


async def newest_promoted(connection: AsyncConnection, name: str) -> int:
    """Return the newest version of a policy that ever got the traffic, whoever gave it that."""
    return int(await connection.scalar(_NEWEST_PROMOTED, {"name": name}) or 0)


async def served_since(connection: AsyncConnection, name: str, at: datetime) -> set[int]:
    """Return the versions that had the traffic at that time or later, but for the control."""
    rows = await connection.execute(_SERVED_SINCE, {"name": name, "at": at})
    return set(rows.scalars())


async def next_control(
    connection: AsyncConnection, name: str, newest: int, served: Collection[int], before: datetime
) -> int | None:
    """Return the newest loaded one of these versions up to `newest`, or else the next, if any.

    It had the traffic before the time `before`.
    """
    values = {"name": name, "newest": newest, "served": list(served), "before": before}
    version: int | None = await connection.scalar(_NEXT_CONTROL, values)
    return version


async def last_given(connection: AsyncConnection, name: str, version: int) -> Row[Any]:
    """Return from which state, by whom and with which verdict a version got the traffic last."""
    return (await connection.execute(_LAST_GIVEN, {"name": name, "version": version})).one()


async def episodes_per_hour(connection: AsyncConnection, policy: str) -> float:
    """Return how many episodes of a policy began in an hour, on average of the last 24."""
    now: datetime = (await connection.execute(text("SELECT now()"))).scalar_one()
    values = {"policy": policy, "first": lowest_id_at(now - timedelta(hours=24))}
    return int(await connection.scalar(_NEW_EPISODES, values) or 0) / 24


# What the episodes came to, arm by arm

# Episodes are looked for by their ids, which are those of the calls that were stored first; the few
# that have another first call have an index of their own. The order is that of first calls, which
# does not depend on storing.
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
# The planner takes a short range of ids for one row, and joins thousands of episodes in loops over
# all of them; of a list that it is given it knows the length, unless it plans for lists of any.
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
# Rewards of single calls say nothing of when the last one comes.
_REWARDED: Final = text(
    f"""
    WITH {_PARTS},
    terms AS ({TERMS_OF_POLICY}),
    {sums("f.at < p.until")}
    SELECT whole, first_at FROM sums WHERE call_id IS NULL AND value IS NOT NULL
    """
)
# Calls are looked for in the days until what counts has ended. A call that had not ended took all
# the time that there was. If it is the first, the episode had got nothing of the policy by then,
# and failed; later ones are under way in every long episode.
_CAME_TO: Final = text(
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
    {rewards("f.at < p.until")}
    SELECT b.id, c.arm, c.version, c.seconds, c.failed, t.malformed, r.value AS reward
    FROM given b LEFT JOIN called c ON c.whole = b.id
    LEFT JOIN tools t ON t.whole = b.id LEFT JOIN rewards r ON r.whole = b.id
    """
)
# A call's id is made as the call begins; no two clocks are so far apart.
_APART: Final = timedelta(days=1)
# The clocks of proxies are less apart: a call has ended if a reward came so long before its end.
SKEW: Final = timedelta(seconds=1)


class ArmEpisode(Record, frozen=True, kw_only=True):
    """Describe what one episode says about its arm.

    `version` is the one that it was given. `reward` is None while nobody scored it. `failed` says
    whether any of its requests came to an error, or to a reply that broke off by itself, or the
    first had not ended. `malformed` says whether a tool call of it was; None if it called no tool.
    `seconds` is the mean duration of its calls, as far as these had come.
    """

    id: UUID
    began: datetime
    arm: Arm | None
    version: int | None
    family: str
    reward: float | None
    failed: bool | None
    malformed: bool | None
    seconds: float | None


async def begun_episodes(
    connection: AsyncConnection, policy: str, first: UUID, until: datetime, most: int
) -> Sequence[Row[Any]]:
    """Return at most `most` episodes with a first call from `first` on, and before `until`.

    They are in the order of these. A row has `id`, `method`, `first_call_id`, and the `task` as it
    is kept.
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
    """Return those of these episodes that count before `until`, in the order in which they count.

    What was given to no arm is among them. All that was said before `until` is stored. What comes
    later than `within` after an episode's beginning does not count. If `soon`, an episode with a
    reward counts at once, and not as late as the others.
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
    at = latest = {one: start + within for one, start in began.items()}
    if soon:
        ends = {one: min(end, until) for one, end in latest.items()}
        rewarded = (await connection.execute(_REWARDED, values(ends))).all()
        at = latest | {one: min(max(first, began[one]), latest[one]) for one, first in rewarded}
    counted = {one: min(at[one] + SKEW, latest[one]) for one in at if at[one] < until}
    if not counted:
        return []
    bounds = {
        "first": min(known[one].first_call_id for one in counted),
        "latest": lowest_id_at(max(counted.values()) + _APART),
    }
    rows = await connection.execute(_CAME_TO, values(counted) | bounds)
    families = {one: task_family(row.task and bare(row.task)) for one, row in known.items()}
    episodes = [
        ArmEpisode(began=began[row.id], family=families[row.id], **row._mapping) for row in rows
    ]
    return sorted(episodes, key=lambda one: (at[one.id], known[one.id].first_call_id))
