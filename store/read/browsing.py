"""Read what the console shows of many episodes and calls at once, in bounded time.

Episodes are looked at from the newest on, a chunk at a time, by the index of their ids, until a
page is full or its time is over; whoever wants more goes on from the last one looked at. So every
filter costs the same however rare what it chooses is, and nothing is counted that is not looked at.

An episode that calls of several policies are in counts once for each: each has its own reward, and
consumes it by itself.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any, Final, Literal
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at, time_of
from store.read.lines import QUIET
from store.records import Record
from store.schema.tables import SPLIT
from store.tenants import DEFAULT, SEPARATOR, beginning, scoped

# Where an episode is on its way. `scored` waits for an update; `untrained` was consumed, and its
# reason says why it taught nothing.
State = Literal["open", "unscored", "failed", "scored", "trained", "untrained", "quarantined"]

# What a page asks differs from one to the next, so a plan for any values is a bad one; and no query
# of a page is so long that compiling it pays.
_BEGIN: Final = text(
    """
    SELECT set_config('statement_timeout', :limit_ms, true),
        set_config('plan_cache_mode', 'force_custom_plan', true), set_config('jit', 'off', true)
    """
)


async def begin(connection: AsyncConnection, limit_s: float) -> None:
    """Have each statement of this transaction end within `limit_s` seconds, or fail."""
    await connection.execute(_BEGIN, {"limit_ms": str(round(1000 * limit_s))})


class EpisodeFilter(Record, frozen=True, kw_only=True):
    """Choose episodes that meet all conditions; a field of None chooses all.

    Attributes:
        policy: a call of the episode is of this policy.
        version: a call of it is of this version of the policy, or of ones before and after it.
        agent: a call of it is by this agent.
        task: its task.
        split: `train` or `eval`.
        state: where it is on its way.
        reason: why it was set aside or consumed untrained, has no reward, or has a call that cannot
            be trained.
        low: its reward is at least this.
        high: its reward is at most this.
        since: it began at or after this time.
        until: it began before this time.
        text: its key or task, or what a call of it said or was told, has this text.
    """

    policy: str | None = None
    version: int | None = None
    agent: str | None = None
    task: str | None = None
    split: str | None = None
    state: State | None = None
    reason: str | None = None
    low: float | None = None
    high: float | None = None
    since: datetime | None = None
    until: datetime | None = None
    text: str | None = None


# Of a policy that an episode has no call of, the episode's own.
_REWARD: Final = "CASE WHEN p.policy IS NULL THEN e.reward ELSE p.reward END"
_STATE: Final = f"""CASE WHEN e.quarantined_reason IS NOT NULL THEN 'quarantined'
    WHEN c.trained THEN 'trained' WHEN NOT c.trained THEN 'untrained'
    WHEN {_REWARD} IS NOT NULL THEN 'scored' WHEN COALESCE(p.failed, e.failed) THEN 'failed'
    WHEN COALESCE(p.call_scored_at, e.call_scored_at) IS NOT NULL THEN 'scored'
    WHEN COALESCE(p.last_call_at, e.last_call_at) > now() - interval '{QUIET.total_seconds()} s'
        THEN 'open'
    ELSE 'unscored' END"""
_REASON: Final = "COALESCE(e.quarantined_reason, c.reason, p.lacks)"
_TASK: Final = "COALESCE(e.joined_task, e.task)"
_FROM: Final = """
    FROM episodes e LEFT JOIN episode_policies p ON p.episode_id = e.id
    LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
    WHERE e.deleted_at IS NULL AND e.root IS NULL AND e.id < :before AND e.id >= :last"""
_PARTS: Final = "ANY(ARRAY(SELECT q.id FROM episodes q WHERE q.id = {id} OR q.root = {id}))"
# A subquery of one row, so that it is never made a join with all calls. A call is no older than the
# episode that it began, but for clocks that differ.
_CALL: Final = (
    f"(SELECT true FROM transitions t WHERE t.episode_id = {_PARTS.format(id='e.id')}"
    " AND t.id >= :calls_since AND {condition} LIMIT 1)"
)
_IS_SAID: Final = (
    "(position(:raw IN t.reply) > 0 OR position(:raw IN t.request) > 0"
    " OR position(:escaped IN t.reply) > 0 OR position(:escaped IN t.request) > 0)"
)
_CONDITIONS: Final[Mapping[str, str]] = {
    "policy": "p.policy = :policy",
    "version": ":version BETWEEN p.version AND p.latest",
    "task": f"{_TASK} = :task",
    "split": f"{SPLIT} = :split",
    "state": f"{_STATE} = :state",
    "low": f"{_REWARD} >= :low",
    "high": f"{_REWARD} <= :high",
    "agent": _CALL.format(condition="t.agent = :agent"),
    "reason": "(:reason IN (c.reason, e.quarantined_reason, p.lacks) OR "
    + _CALL.format(condition="t.reason = :reason")
    + ")",
    "text": f"(strpos(e.key, :text) > 0 OR strpos({_TASK}, :text) > 0 OR "
    + _CALL.format(condition=_IS_SAID)
    + ")",
}
# Conditions for which calls are read, with how many episodes are looked at first.
_OF_CALLS: Final = {"agent": 100, "reason": 100, "text": 25}
_FIRST: Final = 200
_NEWEST: Final = UUID(int=2**128 - 1)
_APART: Final = timedelta(days=1)


def _whose(tenant: str) -> str:
    """Return the condition for an episode of a tenant, as `store.read.episodes.is_of` does."""
    return "strpos(e.key, chr(31)) <= 1" if tenant == DEFAULT else "starts_with(e.key, :whose)"


def _who(tenant: str | None) -> dict[str, str | None]:
    return {} if tenant in (None, DEFAULT) else {"whose": beginning(tenant or DEFAULT)}


class _Query:
    """Hold the SQL and the values of a filter for a viewer of `tenant` (None: of all tenants)."""

    def __init__(self, chosen: EpisodeFilter, tenant: str | None) -> None:
        given = {k: v for k, v in msgspec.structs.asdict(chosen).items() if v is not None}
        self.first = min([_FIRST, *(_OF_CALLS[name] for name in given if name in _OF_CALLS)])
        self.since = lowest_id_at(given.pop("since", datetime.fromtimestamp(0).astimezone()))
        until = given.pop("until", None)
        self.before = _NEWEST if until is None else lowest_id_at(until)
        conditions = [_CONDITIONS[name] for name in given]
        if tenant is not None:
            conditions.append(_whose(tenant))
            given |= _who(tenant)
        if "task" in given and (tenant is not None or SEPARATOR not in given["task"]):
            given["task"] = scoped(tenant or DEFAULT, given["task"])
        if "text" in given:
            # Bodies are JSON, in which either is usual.
            raw = (json.dumps(given["text"], ensure_ascii=plain)[1:-1] for plain in (False, True))
            given["raw"], given["escaped"] = (one.encode(errors="replace") for one in raw)
        self.sql = _FROM + "".join(f" AND {condition}" for condition in conditions)
        self.values: dict[str, Any] = given

    def within(self, last: UUID, before: UUID) -> dict[str, Any]:
        """Return the values for the episodes from `last` to the one before `before`."""
        since = lowest_id_at(max(time_of(last) - _APART, time_of(UUID(int=0))))
        return {**self.values, "last": last, "before": before, "calls_since": since}


_LAST_OF_CHUNK: Final = """
    SELECT id FROM episodes e WHERE deleted_at IS NULL AND id < :before AND id >= :since{own}
    ORDER BY id DESC OFFSET :chunk - 1 LIMIT 1
"""
_OLDEST: Final = """
    SELECT id FROM episodes e WHERE deleted_at IS NULL AND id < :before AND id >= :since{own}
    ORDER BY id LIMIT 1
"""
# So many policies may one episode have calls of, to be shown with all of them.
_POLICIES: Final = 32
_LINES: Final = f"""
    SELECT e.id, e.key, {_TASK} AS task, {SPLIT} AS split, p.policy, p.version, p.latest,
        {_REWARD} AS reward, {_STATE} AS state, {_REASON} AS reason,
        COALESCE(p.last_call_at, e.last_call_at) AS last_call_at
    {{chosen}}
    ORDER BY e.id DESC, p.policy LIMIT :rows
"""
# So many calls of an episode are counted.
MOST_CALLS: Final = 200
_CALLED: Final = text(
    f"""
    SELECT w.id, c.calls, c.agents FROM unnest(CAST(:ids AS uuid[])) w (id), LATERAL (
        SELECT count(*) AS calls, array_agg(DISTINCT agent) AS agents FROM (
            SELECT t.agent FROM transitions t
            WHERE t.episode_id = {_PARTS.format(id="w.id")} AND t.id >= :calls_since
            LIMIT {MOST_CALLS}) t) c
    """
)


class EpisodeLine(Record, frozen=True, kw_only=True):
    """Describe an episode in a list, as one policy sees it.

    `version` and `latest` are the lowest and highest version that served a call. `calls` are
    counted up to `MOST_CALLS`. Names are as they are kept (`store.tenants`).
    """

    id: UUID
    key: str
    task: str | None
    split: str
    policy: str | None
    version: int | None
    latest: int | None
    reward: float | None
    state: State
    reason: str | None
    last_call_at: datetime
    calls: int
    agents: tuple[str, ...]


class EpisodePage(Record, frozen=True, kw_only=True):
    """Hold a part of a list of episodes, newest first.

    `goes_on_before` is the id that the next part comes before; None: this is the last. `is_full`:
    there were enough; else the time was over after the episode of that id.
    """

    lines: list[EpisodeLine]
    goes_on_before: UUID | None
    is_full: bool


async def _last_of(
    connection: AsyncConnection, bounds: Mapping[str, Any], tenant: str | None = None
) -> UUID | None:
    """Return the last of a chunk of episodes, of a tenant's own; None: there are fewer."""
    own = "" if tenant is None else f" AND {_whose(tenant)}"
    query = text(_LAST_OF_CHUNK.format(own=own))
    last: UUID | None = await connection.scalar(query, {**bounds, **_who(tenant)})
    return last


async def browse(
    connection: AsyncConnection,
    chosen: EpisodeFilter,
    tenant: str | None,
    *,
    before: UUID | None = None,
    most: int = 50,
    within_s: float = 0.12,
) -> EpisodePage:
    """Return the newest episodes that a filter chooses, of a tenant or of all.

    Args:
        connection: a connection of a transaction that `begin` began.
        chosen: the filter.
        tenant: whose episodes; None: of all.
        before: only episodes before the one of this id.
        most: how many at most; of an episode all policies are shown.
        within_s: after about how many seconds to stop looking.
    """
    query = _Query(chosen, tenant)
    lines = text(_LINES.format(chosen=query.sql))
    upto = min(before or query.before, query.before)
    found: list[Any] = []
    chunk, began = query.first, monotonic()
    while True:
        bounds = {"before": upto, "since": query.since, "chunk": chunk}
        last = await _last_of(connection, bounds)
        values = query.within(last or query.since, upto)
        rows = await connection.execute(lines, values | {"rows": most + _POLICIES - len(found)})
        found += rows
        if len(found) > most or last is None:
            break
        upto, spent = last, monotonic() - began
        if spent > within_s:
            break
        # As many as the time that is left may do, and never many more than before.
        chunk = max(query.first, min(4 * chunk, round(chunk * (within_s - spent) / spent)))
    shown = found[:most]
    shown += [row for row in found[most:] if row.id == shown[-1].id]
    is_full = len(found) > len(shown)
    return EpisodePage(
        lines=await _with_calls(connection, shown),
        goes_on_before=shown[-1].id if is_full else last,
        is_full=is_full,
    )


async def _with_calls(connection: AsyncConnection, rows: Sequence[Any]) -> list[EpisodeLine]:
    ids = sorted({row.id for row in rows})
    if not ids:
        return []
    values = {"ids": ids, "calls_since": lowest_id_at(time_of(ids[0]) - _APART)}
    called = {row.id: row for row in await connection.execute(_CALLED, values)}
    return [
        EpisodeLine(
            **row._mapping,
            calls=called[row.id].calls,
            agents=tuple(called[row.id].agents or ()),
        )
        for row in rows
    ]


BARS: Final = 20
# So many episodes are counted, of a filter that reads no calls.
MOST_COUNTED: Final = 10_000
_COUNTED: Final = f"""
    WITH found AS MATERIALIZED (SELECT {_STATE} AS state, {_REWARD} AS reward {{chosen}}),
    edges AS (SELECT LEAST(0, min(reward)) AS low, GREATEST(1, max(reward)) AS high FROM found)
    SELECT state, low, high, count(*) AS episodes,
        CASE WHEN reward = high THEN {BARS} ELSE width_bucket(reward, low, high, {BARS}) END AS bar
    FROM found, edges GROUP BY state, low, high, bar
"""


class EpisodeCounts(Record, frozen=True, kw_only=True):
    """Count the newest episodes of a filter by state, and their rewards in `BARS` equal ranges.

    `bars` are those from `low` to `high`. `looked_at` is how many of the newest episodes were
    looked at; None: all.
    """

    states: dict[State, int]
    bars: list[int]
    low: float
    high: float
    looked_at: int | None


async def count_episodes(
    connection: AsyncConnection, chosen: EpisodeFilter, tenant: str | None
) -> EpisodeCounts:
    """Count the newest episodes of a filter, of a tenant or of all; rewards of any size count."""
    query = _Query(msgspec.structs.replace(chosen, low=None, high=None), tenant)
    chunk = MOST_COUNTED if query.first == _FIRST else 5 * query.first
    bounds = {"before": query.before, "since": query.since, "chunk": chunk}
    last = await _last_of(connection, bounds, tenant)
    values = query.within(last or query.since, query.before)
    rows = (await connection.execute(text(_COUNTED.format(chosen=query.sql)), values)).all()
    states: dict[State, int] = {}
    bars = [0] * BARS
    for row in rows:
        states[row.state] = states.get(row.state, 0) + row.episodes
        if row.bar is not None:
            bars[row.bar - 1] += row.episodes
    return EpisodeCounts(
        states=states,
        bars=bars,
        low=rows[0].low if rows else 0.0,
        high=rows[0].high if rows else 1.0,
        looked_at=None if last is None else chunk,
    )


# What the overview says

# A time is shown in so many parts.
PARTS: Final = 40
# So many of the newest calls are counted; of a tenant, those of so many of its newest episodes.
MOST_CALLS_COUNTED: Final = 10_000
MOST_OWN: Final = 500
_OWN_CALLS: Final = """
    (SELECT e.id FROM episodes e WHERE e.id >= :begun AND {whose}
        ORDER BY e.id DESC LIMIT :own) own
    CROSS JOIN LATERAL (SELECT * FROM transitions c WHERE c.episode_id = own.id
        ORDER BY c.started_at DESC LIMIT :of_each) t"""
_LAST_OF_CALLS: Final = text(
    "SELECT id FROM transitions WHERE id >= :since ORDER BY id DESC OFFSET :most - 1 LIMIT 1"
)
_FIGURES: Final = f"""
    WITH found AS MATERIALIZED (
        SELECT p.policy, {SPLIT} AS split, p.version,
            CASE WHEN e.quarantined_reason IS NULL THEN {_REWARD} END AS reward,
            {_STATE} AS state, {_REASON} AS reason,
            date_bin(CAST(:width AS interval), p.last_call_at, CAST(:at AS timestamptz)) AS bucket
        {{chosen}} AND p.policy IS NOT NULL)
    SELECT policy, split, version, state, reason, bucket, count(*) AS episodes,
        count(reward) AS scored, avg(reward) AS mean, stddev_samp(reward) AS spread,
        count(*) FILTER (WHERE reward NOT IN (0, 1)) AS graded
    FROM found GROUP BY GROUPING SETS ((policy, split, bucket), (policy, split, version),
        (policy, state, reason))
"""
_TRAFFIC: Final = """
    WITH called AS MATERIALIZED (
        SELECT t.started_at, t.trainable, t.reason,
            t.status <> 'complete' OR t.http_status >= 400 AS failed
        FROM {calls} WHERE t.id >= :last)
    SELECT LEAST(GREATEST(floor(extract(epoch FROM started_at - :at) / :seconds), 0), :parts - 1)
        AS part, reason, count(*) AS calls, count(*) FILTER (WHERE failed) AS failed,
        count(*) FILTER (WHERE trainable) AS trainable
    FROM called GROUP BY GROUPING SETS ((part), (reason))
"""
_WAITING: Final = text(
    """
    SELECT name AS policy, version, state, changed_at AS since, NULL::uuid AS update_id
    FROM policies WHERE state IN ('written', 'loaded', 'canary')
        AND (CAST(:tenant AS text) IS NULL OR tenant = :tenant)
    UNION ALL
    SELECT u.policy, NULL, 'running', u.claimed_at, u.id FROM updates u
    WHERE u.state = 'running' AND (CAST(:tenant AS text) IS NULL OR EXISTS (
        SELECT FROM policies p WHERE p.name = u.policy AND p.version = 0 AND p.tenant = :tenant))
    ORDER BY policy, since
    """
)

_PROMOTIONS: Final = text(
    """
    SELECT name AS policy, version, at FROM policy_events v
    WHERE to_state = 'serving' AND from_state IS DISTINCT FROM 'serving' AND at >= :since
        AND (CAST(:tenant AS text) IS NULL OR EXISTS (
            SELECT FROM policies p WHERE p.name = v.name AND p.version = 0 AND p.tenant = :tenant))
    ORDER BY at DESC LIMIT 200
    """
)


class Rewards(Record, frozen=True, kw_only=True):
    """Describe the rewards of some episodes of a policy.

    `at` is the beginning of their time, or `version` the lowest version that served a call of them.
    `mean` and `spread`, the sample standard deviation, are of the `scored` ones, without those that
    are quarantined, as gates read them. `graded`: some rewards are neither 0 nor 1.
    """

    policy: str
    split: str
    at: datetime | None
    version: int | None
    episodes: int
    scored: int
    mean: float | None
    spread: float | None
    graded: bool


class Fate(Record, frozen=True, kw_only=True):
    """Count the episodes of a policy that are in a state for a reason."""

    policy: str
    state: State
    reason: str | None
    episodes: int


class Promotion(Record, frozen=True, kw_only=True):
    """Say when a version got the traffic."""

    policy: str
    version: int
    at: datetime


class Waiting(Record, frozen=True, kw_only=True):
    """Name a version that does not serve yet, or an update that is running, and since when."""

    policy: str
    version: int | None
    state: str
    since: datetime
    update_id: UUID | None


class Traffic(Record, frozen=True, kw_only=True):
    """Count the newest calls since a time, and those that cannot be trained by reason.

    Of a tenant they are those of its `MOST_OWN` newest episodes, `MOST_CALLS` of each.
    `parts` are `PARTS` parts of `width` from then on, each with its calls and how many of them
    failed. `is_cut`: there are older calls of the time that was asked for.
    """

    since: datetime
    width: timedelta
    parts: list[tuple[int, int]]
    reasons: dict[str, int]
    calls: int
    trainable: int
    is_cut: bool


class Figures(Record, frozen=True, kw_only=True):
    """Hold what the newest episodes of a time came to.

    `since`: only episodes begun from here on were looked at, if that is later than what was asked
    for.
    """

    by_time: list[Rewards]
    by_version: list[Rewards]
    fates: list[Fate]
    since: datetime | None


async def figures(connection: AsyncConnection, tenant: str | None, since: datetime) -> Figures:
    """Return what the newest `MOST_COUNTED` episodes since then came to.

    The time from the first of them until now has `PARTS`.
    """
    query = _Query(EpisodeFilter(since=since), tenant)
    bounds = {"before": query.before, "since": query.since, "chunk": MOST_COUNTED}
    last = await _last_of(connection, bounds, tenant)
    oldest = last
    if last is None:
        own = "" if tenant is None else f" AND {_whose(tenant)}"
        asked = {**bounds, **_who(tenant)}
        oldest = await connection.scalar(text(_OLDEST.format(own=own)), asked)
    first = since if oldest is None else max(since, time_of(oldest))
    width = (datetime.now(UTC) - first) / PARTS
    values = query.within(last or query.since, query.before) | {"width": width, "at": first}
    rows = (await connection.execute(text(_FIGURES.format(chosen=query.sql)), values)).all()
    rewards = [
        Rewards(
            policy=row.policy,
            split=row.split,
            at=row.bucket,
            version=row.version,
            episodes=row.episodes,
            scored=row.scored,
            mean=row.mean,
            spread=row.spread,
            graded=row.graded > 0,
        )
        for row in rows
        if row.split is not None
    ]
    fates = [
        Fate(policy=row.policy, state=row.state, reason=row.reason, episodes=row.episodes)
        for row in rows
        if row.state is not None
    ]
    return Figures(
        by_time=sorted((one for one in rewards if one.at), key=lambda one: (one.policy, one.at)),
        by_version=sorted(
            (one for one in rewards if one.version is not None),
            key=lambda one: (one.policy, one.version),
        ),
        fates=sorted(fates, key=lambda one: -one.episodes),
        since=None if last is None else first,
    )


def calls_of(tenant: str | None, begun: datetime) -> tuple[str, dict[str, Any]]:
    """Return SQL for calls `t`, and its values: of all, or of a tenant's newest episodes.

    Those are begun at `begun` or later, so that a tenant's calls are found beside any others.
    """
    if tenant is None:
        return "transitions t", {}
    own = {"begun": lowest_id_at(begun), "own": MOST_OWN, "of_each": MOST_CALLS, **_who(tenant)}
    return _OWN_CALLS.format(whose=_whose(tenant)), own


async def traffic(connection: AsyncConnection, tenant: str | None, since: datetime) -> Traffic:
    """Count the newest calls since then, in `PARTS` of time, of a tenant or of all."""
    last: UUID | None
    begun = since - _APART
    if tenant is None:
        bounds = {"since": lowest_id_at(since), "most": MOST_CALLS_COUNTED}
        last = await connection.scalar(_LAST_OF_CALLS, bounds)
    else:
        bounds = {"since": lowest_id_at(begun), "before": _NEWEST, "chunk": MOST_OWN}
        last = await _last_of(connection, bounds, tenant)
        last = None if last is None or time_of(last) < since else last
    first = since if last is None else time_of(last)
    width = (datetime.now(UTC) - first) / PARTS
    values = {
        "last": last or lowest_id_at(since),
        "at": first,
        "seconds": width.total_seconds(),
        "parts": PARTS,
    }
    calls, own = calls_of(tenant, begun)
    query = text(_TRAFFIC.format(calls=calls))
    rows = (await connection.execute(query, values | own)).all()
    parts = [(0, 0)] * PARTS
    for row in rows:
        if row.part is not None:
            parts[int(row.part)] = (row.calls, row.failed)
    return Traffic(
        since=first,
        width=width,
        parts=parts,
        reasons={row.reason: row.calls for row in rows if row.reason is not None},
        calls=sum(calls for calls, _ in parts),
        trainable=sum(row.trainable for row in rows if row.part is not None),
        is_cut=last is not None,
    )


async def waiting(connection: AsyncConnection, tenant: str | None) -> list[Waiting]:
    """Return the versions that do not serve yet, and the updates that are running."""
    rows = await connection.execute(_WAITING, {"tenant": tenant})
    return [Waiting(**row._mapping) for row in rows]


async def promotions(
    connection: AsyncConnection, tenant: str | None, since: datetime
) -> list[Promotion]:
    """Return which versions got the traffic since then, the last first."""
    rows = await connection.execute(_PROMOTIONS, {"tenant": tenant, "since": since})
    return [Promotion(**row._mapping) for row in rows]
