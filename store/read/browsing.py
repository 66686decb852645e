"""Read many episodes and calls at once for the console, in bounded time.

Episodes are read from the newest on, a chunk at a time, by the index of their ids, until a page is
full or its time is over; the next page goes on after the last episode read. So the cost of a filter
does not depend on how rare its matches are, and only episodes that were read are counted.

An episode with calls of several policies counts once for each: each has its own reward, and
consumes the episode by itself.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec
from msgspec import Meta
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.ids import lowest_id_at, time_of
from store.read.evaluations import mean_rewards_sql
from store.read.lines import QUIET_PERIOD
from store.records import EVAL, Record, Split
from store.schema.tables import SPLIT
from store.tenants import DEFAULT, SEPARATOR, scoped

# An episode's progress. A `scored` one waits for an update; an `untrained` one was consumed without
# training, and its reason says why.
State = Literal["open", "unscored", "failed", "scored", "trained", "untrained", "quarantined"]

# No name that a client gives is longer, and PostgreSQL stores no U+0000.
LONGEST_NAME: Final = 512
Name = Annotated[str, Meta(max_length=LONGEST_NAME, pattern="^[^\0]*$")]
Version = Annotated[int, Meta(ge=0, lt=2**31)]
# Neither infinite nor NaN.
Finite = Annotated[float, Meta(ge=-1e308, le=1e308)]
Rows = Sequence[Row[Any]]

# Values differ from page to page, so a generic plan is a bad one. No query of a page is so long
# that compiling it pays. No page may take a second core from the serving processes.
_BEGIN: Final = text(
    """
    SELECT set_config('statement_timeout', :limit_ms, true),
        set_config('plan_cache_mode', 'force_custom_plan', true), set_config('jit', 'off', true),
        set_config('max_parallel_workers_per_gather', '0', true)
    """
)


async def set_up_transaction(connection: AsyncConnection, limit_s: float) -> None:
    """Limit each statement of this transaction to `limit_s` seconds; configure the planner."""
    await connection.execute(_BEGIN, {"limit_ms": str(round(1000 * limit_s))})


class EpisodeFilter(Record, frozen=True, kw_only=True):
    """A filter of episodes: all conditions hold for an episode; None is no condition.

    Attributes:
        policy: a call of the episode is of this policy.
        version: lies between the lowest and the highest version of the policy that served it.
        agent: a call of the episode is by this agent.
        task: its task.
        split: `train` or `eval`.
        state: its progress.
        reason: why it was quarantined or consumed untrained, why it has no reward, or why a call
            of it cannot be trained on.
        low: its reward is at least this.
        high: its reward is at most this.
        since: it began at or after this time.
        until: it began before this time.
        text: occurs in its key, in its task, or in a request or reply of its calls.
    """

    policy: Name | None = None
    version: Version | None = None
    agent: Name | None = None
    task: Name | None = None
    split: Split | None = None
    state: State | None = None
    reason: Name | None = None
    low: Finite | None = None
    high: Finite | None = None
    since: datetime | None = None
    until: datetime | None = None
    text: Name | None = None


# The reward for the policy; the episode's own reward if no policy served a call.
_REWARD: Final = "CASE WHEN p.policy IS NULL THEN e.reward ELSE p.reward END"
_STATE: Final = f"""CASE WHEN e.quarantined_reason IS NOT NULL THEN 'quarantined'
    WHEN c.trained THEN 'trained' WHEN NOT c.trained THEN 'untrained'
    WHEN {_REWARD} IS NOT NULL THEN 'scored' WHEN COALESCE(p.failed, e.failed) THEN 'failed'
    WHEN COALESCE(p.call_scored_at, e.call_scored_at) IS NOT NULL THEN 'scored'
    WHEN COALESCE(p.last_call_at, e.last_call_at) >
        now() - interval '{QUIET_PERIOD.total_seconds()} s' THEN 'open'
    ELSE 'unscored' END"""
_REASON: Final = "COALESCE(e.quarantined_reason, c.reason, p.lacks)"
_TASK: Final = "COALESCE(e.joined_task, e.task)"
# `update` is the update that consumed the episode, or has claimed it.
_FATES: Final = text(
    f"""
    SELECT e.id, p.policy, {_STATE} AS state, {_REASON} AS reason,
        COALESCE(c.update_id, p.claimed_by) AS update
    FROM episodes e JOIN episode_policies p ON p.episode_id = e.id
        LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
    WHERE e.id = ANY(:ids) ORDER BY p.policy
    """
)
# Whether an episode is of `:tenant`, as `store.read.episodes.is_of_tenant` says; null: of any.
IS_OF_TENANT: Final = f"""(CAST(:tenant AS text) IS NULL OR CASE :tenant
    WHEN '{DEFAULT}' THEN strpos(e.key, chr({ord(SEPARATOR)})) <= 1
    ELSE starts_with(e.key, :tenant || chr({ord(SEPARATOR)})) END)"""
_PARTS: Final = "ANY(ARRAY(SELECT q.id FROM episodes q WHERE q.id = {id} OR q.root = {id}))"
# A subquery of one row, so that it is never made a join with all calls.
_CALL: Final = (
    f"(SELECT true FROM transitions t WHERE t.episode_id = {_PARTS.format(id='e.id')}"
    " AND t.id >= :calls_since AND {condition} LIMIT 1)"
)
_CONTAINS_TEXT: Final = (
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
    + _CALL.format(condition=_CONTAINS_TEXT)
    + ")",
}
_FROM: Final = f"""
    FROM episodes e LEFT JOIN episode_policies p ON p.episode_id = e.id
    LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
    WHERE e.deleted_at IS NULL AND e.root IS NULL AND e.id < :before AND e.id >= :last
        AND {IS_OF_TENANT}"""
_LAST: Final = text(
    f"""
    SELECT id FROM episodes e
    WHERE deleted_at IS NULL AND id < :before AND id >= :since AND {IS_OF_TENANT}
    ORDER BY id DESC OFFSET :most - 1 LIMIT 1
    """
)
# Size of the first chunk; each further chunk has this many episodes more than the last.
_FIRST_CHUNK: Final = 2000
# Conditions that read calls, and how many times as long they take for an episode.
_SLOWER: Final = {"agent": 20, "reason": 20, "text": 80}
_NEWEST: Final = UUID(int=2**128 - 1)
# Clocks differ, so a call's id may be older than its episode's: by a day at most.
ID_SKEW: Final = 86_400_000 << 80


def _most_episodes_to_read(most: int, chosen: EpisodeFilter) -> int:
    """Return how many episodes to read: `most`, or fewer if the filter reads calls, too."""
    given = [name for name in _SLOWER if getattr(chosen, name) is not None]
    return most // max([1, *(_SLOWER[name] for name in given)])


def _filter_query(chosen: EpisodeFilter, tenant: str | None) -> tuple[str, dict[str, Any]]:
    """Return a filter's SQL, for the episodes of `tenant` (None: of all), and its values.

    The SQL selects episodes `e` with ids from `:last` (`_values_down_to`) to below `:before`.
    """
    given = {k: v for k, v in msgspec.structs.asdict(chosen).items() if v is not None}
    sql = _FROM + "".join(f" AND {_CONDITIONS[name]}" for name in given if name in _CONDITIONS)
    if "task" in given and (tenant is not None or SEPARATOR not in given["task"]):
        given["task"] = scoped(tenant or DEFAULT, given["task"])
    if "text" in given:
        # Bodies are JSON, in which characters beyond ASCII may be escaped or not.
        raw = (json.dumps(given["text"], ensure_ascii=plain)[1:-1] for plain in (False, True))
        given["raw"], given["escaped"] = (one.encode(errors="replace") for one in raw)
    bounds = {
        "tenant": tenant,
        "since": lowest_id_at(chosen.since) if chosen.since else UUID(int=0),
        "before": lowest_id_at(chosen.until) if chosen.until else _NEWEST,
    }
    return sql, given | bounds


def _values_down_to(last: UUID | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the id `last` of the oldest episode to read to `_filter_query`'s values; None: all."""
    last = last or values["since"]
    return {**values, "last": last, "calls_since": UUID(int=max(0, last.int - ID_SKEW))}


async def _last_of_newest(
    connection: AsyncConnection, values: Mapping[str, Any], most: int
) -> UUID | None:
    """Return the oldest of the newest `most` episodes of `:tenant`; None: there are fewer."""
    last: UUID | None = await connection.scalar(_LAST, {**values, "most": most})
    return last


# Most calls of an episode that are counted.
MOST_CALLS: Final = 200
_LINES: Final = f"""
    SELECT w.*, called.* FROM (
        SELECT e.id, e.key, {_TASK} AS task, {SPLIT} AS split, p.policy, p.version, p.latest,
            {_REWARD} AS reward, {_STATE} AS state, {_REASON} AS reason,
            COALESCE(p.last_call_at, e.last_call_at) AS last_call_at
        {{chosen}}
        ORDER BY e.id DESC, p.policy LIMIT :most) w
    CROSS JOIN LATERAL (
        SELECT count(*) AS calls, array_agg(DISTINCT agent) AS agents FROM (
            SELECT t.agent FROM transitions t
            WHERE t.episode_id = {_PARTS.format(id="w.id")} AND t.id >= :calls_since
            LIMIT {MOST_CALLS}) t) called
    ORDER BY w.id DESC, w.policy
"""


class EpisodePage(Record, frozen=True, kw_only=True):
    """A page of a list of episodes, newest first, with a line for each policy of an episode.

    A line's `version` and `latest` are the lowest and highest version that served a call. `calls`
    are counted up to `MOST_CALLS`. Names are as stored (`store.tenants`).

    The next page has the episodes before the id `goes_on_before`; None: this is the last page.
    If the page is not `is_full`, reading stopped at this id because the time was over.
    """

    lines: Rows
    goes_on_before: UUID | None
    is_full: bool


async def browse(
    connection: AsyncConnection,
    chosen: EpisodeFilter,
    tenant: str | None,
    *,
    before: UUID | None = None,
    most: int = 50,
    within_s: float = 0.08,
) -> EpisodePage:
    """Return the newest episodes that a filter chooses, of a tenant or of all.

    The page has at most `most` lines, of episodes before the id `before`. After `within_s` seconds
    no further chunk is read. The caller has called `set_up_transaction`.
    """
    sql, values = _filter_query(chosen, tenant)
    query = text(_LINES.format(chosen=sql))
    last: UUID | None = min(before or _NEWEST, values["before"])
    lines: list[Row[Any]] = []
    chunk, until = 0, monotonic() + within_s
    while last and len(lines) <= most:
        values["before"] = last
        chunk += _most_episodes_to_read(_FIRST_CHUNK, chosen)
        last = await _last_of_newest(connection, values | {"tenant": None}, chunk)
        page_values = _values_down_to(last, values) | {"most": most + 1 - len(lines)}
        lines += await connection.execute(query, page_values)
        if monotonic() > until:
            break
    is_full = len(lines) > most
    if is_full:
        # More policies of the last episode may follow.
        lines = [line for line in lines if line.id != lines[-1].id] or lines
        last = lines[-1].id
    return EpisodePage(lines=lines, goes_on_before=last, is_full=is_full)


REWARD_BARS: Final = 20
# Number of newest episodes that are counted for a filter that reads no calls.
MOST_COUNTED: Final = 10_000
_COUNTED: Final = f"""
    WITH counted AS MATERIALIZED (SELECT {_STATE} AS state, {_REWARD} AS reward {{chosen}}),
    edges AS (SELECT LEAST(0, min(reward)) AS low, GREATEST(1, max(reward)) AS high FROM counted)
    SELECT state, low, high, count(*) AS episodes,
        CASE WHEN reward = high THEN {REWARD_BARS}
            ELSE width_bucket(reward, low, high, {REWARD_BARS}) END AS bar
    FROM counted, edges GROUP BY state, low, high, bar
"""


class FilteredCounts(Record, frozen=True, kw_only=True):
    """Counts of the newest episodes that a filter chooses: by state, and by reward in `bars`.

    `bars` has a count for each of `REWARD_BARS` equal ranges from `low` to `high`. `looked_at` is
    how many of the newest episodes were read; None: all.
    """

    states: dict[State, int]
    bars: list[int]
    low: float
    high: float
    looked_at: int | None


async def count_episodes(
    connection: AsyncConnection, chosen: EpisodeFilter, tenant: str | None
) -> FilteredCounts:
    """Count the newest episodes that a filter chooses, ignoring its limits of the reward."""
    sql, values = _filter_query(msgspec.structs.replace(chosen, low=None, high=None), tenant)
    most = _most_episodes_to_read(MOST_COUNTED, chosen)
    last = await _last_of_newest(connection, values, most)
    rows = (
        await connection.execute(text(_COUNTED.format(chosen=sql)), _values_down_to(last, values))
    ).all()
    states: dict[State, int] = {}
    bars = [0] * REWARD_BARS
    for row in rows:
        states[row.state] = states.get(row.state, 0) + row.episodes
        if row.bar is not None:
            bars[row.bar - 1] += row.episodes
    return FilteredCounts(
        states=states,
        bars=bars,
        low=rows[0].low if rows else 0.0,
        high=rows[0].high if rows else 1.0,
        looked_at=None if last is None else most,
    )


# The overview

# Number of parts of the time from the first counted episode until now.
TIME_PARTS: Final = 40
_OUTCOMES: Final = f"""
    WITH newest AS MATERIALIZED (
        SELECT e.id, {_TASK} AS task, p.policy, {SPLIT} AS split, p.last_call_at AS at,
            CASE WHEN e.quarantined_reason IS NULL THEN {_REWARD} END AS reward,
            {_STATE} AS state, {_REASON} AS reason
        {{chosen}} AND p.policy IS NOT NULL),
    time AS (
        SELECT began, (ended - began) / {TIME_PARTS} + interval '1 second' AS width FROM (
            SELECT min(at) AS began, GREATEST(max(at), now()) AS ended FROM newest) bounds),
    placed AS (SELECT newest.*, date_bin(width, at, began) AS part FROM newest, time)
    SELECT m.*, NULL AS state, NULL AS reason
    FROM ({mean_rewards_sql("placed", "policy, split, part")}) m
    UNION ALL SELECT policy, NULL, NULL, count(*), 0, 0, NULL, NULL, false, state, reason
    FROM newest WHERE split <> '{EVAL}' GROUP BY policy, state, reason
    ORDER BY policy, part, episodes DESC
"""
_PROMOTIONS: Final = text(
    """
    SELECT name AS policy, version, at FROM policy_events v
    WHERE to_state = 'serving' AND from_state IS DISTINCT FROM 'serving' AND at >= :since
        AND (CAST(:tenant AS text) IS NULL OR EXISTS (
            SELECT FROM policies p WHERE p.name = v.name AND p.version = 0 AND p.tenant = :tenant))
    ORDER BY at DESC LIMIT 200
    """
)


async def count_outcomes(
    connection: AsyncConnection, tenant: str | None, since: datetime
) -> tuple[Rows, datetime | None]:
    """Count the newest episodes that began at `since` or later, by policy.

    One kind of row counts `episodes` by `split` and `part` of the time, and has the mean reward
    without quarantined episodes (`store.read.evaluations.mean_rewards_sql`), as gates do. The other
    kind counts training episodes by `state` and `reason`, and has `split` and `part` None.

    Also return when the first counted episode began; None: all since then were counted.
    """
    sql, values = _filter_query(EpisodeFilter(since=since), tenant)
    last = await _last_of_newest(connection, values, MOST_COUNTED)
    rows = await connection.execute(
        text(_OUTCOMES.format(chosen=sql)), _values_down_to(last, values)
    )
    return rows.all(), time_of(last) if last else None


async def newest_promotions(
    connection: AsyncConnection, tenant: str | None, since: datetime
) -> Rows:
    """Return the last 200 promotions since `since`, newest first: `policy`, `version`, `at`."""
    return (await connection.execute(_PROMOTIONS, {"tenant": tenant, "since": since})).all()


async def fates_of(
    connection: AsyncConnection, episodes: Sequence[UUID]
) -> dict[UUID, list[dict[str, str]]]:
    """Return, by episode, its `state` for each policy, with `reason` and `update`, if any."""
    fates: dict[UUID, list[dict[str, str]]] = {}
    for row in await connection.execute(_FATES, {"ids": list(episodes)}):
        fate = {name: str(value) for name, value in row._mapping.items() if value is not None}
        fate.pop("id")
        fates.setdefault(row.id, []).append(fate)
    return fates
