"""Read what a gate decides by: where a policy stands, and what its episodes came to, arm by arm.

An episode belongs to the arm that its first call of the policy was given, whatever it went on with.
Left out are those that are quarantined or deleted, evaluation, and those that began with a call
that names its version: none of these were given to an arm by chance.

What counts of an episode is what there was of it a fixed time after it began: calls that had ended
by then, and what was said of it by then. So whoever reads it later reads the same. One whose first
call had not ended by then counts as well: leaving it out would flatter a version that hangs. The
record of such a call is there once it has ended, since a call is recorded as it ends.
"""

from collections.abc import Container, Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at
from store.records import Arm, Record
from store.schema.tables import CLAIMABLE, CONTROL, LIVE
from store.tenants import bare, task_family
from store.values.rewards import TERMS_OF_POLICY, rewards
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
    SELECT {VERSION_COLUMNS}, gate, changed_at, now() AS now, frozen
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
_VERDICTS: Final = text(
    """
    SELECT DISTINCT evidence->>'verdict' FROM policy_events
    WHERE name = :name AND version = :version AND to_state = 'serving'
        AND evidence->>'verdict' IS NOT NULL
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
    version has traffic.
    """

    now: datetime
    frozen: bool
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


async def is_proven(connection: AsyncConnection, name: str, version: int) -> bool:
    """Return whether a version was ever found to be better than its control, or no worse."""
    return "better" in await verdicts(connection, name, version)


async def verdicts(connection: AsyncConnection, name: str, version: int) -> set[str]:
    """Return with which verdicts a version got the traffic, or kept it."""
    values = {"name": name, "version": version}
    return set((await connection.execute(_VERDICTS, values)).scalars())


async def episodes_per_hour(connection: AsyncConnection, policy: str) -> float:
    """Return how many episodes of a policy began in an hour, on average of the last 24."""
    now: datetime = (await connection.execute(text("SELECT now()"))).scalar_one()
    values = {"policy": policy, "first": lowest_id_at(now - timedelta(hours=24))}
    return int(await connection.scalar(_NEW_EPISODES, values) or 0) / 24


# What the episodes came to, arm by arm

# The first 48 bits of a UUIDv7 are the milliseconds since 1970.
_BEGAN: Final = """
    to_timestamp(
        ('x' || left(replace(e.first_call_id::text, '-', ''), 12))::bit(48)::bigint / 1000.0)
"""
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
# Calls are looked for in the days until what counts has ended. A call that had not ended took all
# the time that there was. If it is the first, the episode had got nothing of the policy by then,
# and failed; later ones are under way in every long episode.
_CAME_TO: Final = text(
    f"""
    WITH begun AS (
        SELECT e.id, e.method, {_BEGAN} + make_interval(secs => :counts_s) AS until
        FROM unnest(CAST(:episodes AS uuid[]), CAST(:methods AS text[]), CAST(:firsts AS uuid[]))
            AS e (id, method, first_call_id)),
    parts AS (
        SELECT id AS whole, id, method, until FROM begun
        UNION ALL
        SELECT b.id, e.id, e.method, b.until FROM begun b JOIN episodes e ON e.root = b.id),
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
    FROM begun b LEFT JOIN called c ON c.whole = b.id
    LEFT JOIN tools t ON t.whole = b.id LEFT JOIN rewards r ON r.whole = b.id
    """
)
# A call's id is made as the call begins; no two clocks are so far apart.
_APART: Final = timedelta(days=1)


class ArmEpisode(Record, frozen=True, kw_only=True):
    """Describe what one episode says about its arm.

    `version` is the one that it was given. `reward` is None while nobody scored it. `failed` says
    whether any of its requests came to an error, or to a reply that broke off by itself, or the
    first had not ended. `malformed` says whether a tool call of it was; None if it called no tool.
    `seconds` is the mean duration of its calls, as far as these had come.
    """

    id: UUID
    arm: Arm
    version: int
    family: str
    reward: float | None
    failed: bool
    malformed: bool | None
    seconds: float


async def arm_episodes(
    connection: AsyncConnection,
    policy: str,
    given: Mapping[Arm, Container[int]],
    *,
    since: datetime | UUID,
    until: datetime,
    counts: timedelta,
    most: int,
) -> tuple[list[ArmEpisode], UUID | None]:
    """Return the episodes that arms gave to their versions by chance, in the order of first calls.

    With them comes a bound of first calls to go on from if there are more of that time, or None.

    Args:
        connection: an open connection.
        policy: the policy.
        given: the versions of each arm that is compared. What an arm gave to another is left out:
            it is of another time, as what serves now was once a canary, and a proxy may still take
            it for one.
        since: only episodes begun at or after this time, as both arms ran; or where a part goes on.
        until: only episodes begun before this time.
        counts: what comes later than this after an episode's beginning does not count: calls that
            end later, and what is said of it. Nobody should read it earlier.
        most: the length of a part, before what was given to no arm is left out.
    """
    first = since if isinstance(since, UUID) else lowest_id_at(since)
    range_of = {"policy": policy, "first": first, "last": lowest_id_at(until), "most": most}
    begun = (await connection.execute(_BEGUN, range_of)).all()
    values = {
        "policy": policy,
        "first": first,
        "latest": lowest_id_at(until + counts + _APART),
        "counts_s": counts.total_seconds(),
        "episodes": [row.id for row in begun],
        "methods": [row.method for row in begun],
        "firsts": [row.first_call_id for row in begun],
    }
    await connection.execute(_KNOW_LENGTHS)
    came_to = {row.id: row for row in await connection.execute(_CAME_TO, values)}
    rows = [(row.task, came_to[row.id]) for row in begun]
    episodes = [
        ArmEpisode(family=task_family(task and bare(task)), **row._mapping)
        for task, row in rows
        if row.arm in given and row.version in given[row.arm]
    ]
    return episodes, None if len(begun) < most else UUID(int=begun[-1].first_call_id.int + 1)
