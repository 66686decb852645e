"""Read one episode, and the attempts at one task, as the console shows them: in bounded parts.

An episode may have hundreds of calls of megabytes. Its calls are read without their texts first;
those of a few calls are read afterwards. A request is stored as what it adds to another one, so
the whole ones are made one after the other, and no more are kept than are still needed.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claim_query import HAS_ROLLED_BACK, NOT_ASIDE
from store.claims import members_of
from store.read.assembly import Told, tools_of
from store.records import OWN_EPISODE, Record
from store.schema.tables import FREE
from store.tenants import tenant_of
from store.values.packing import ITEM_BYTES, rebuild, unpack_ids, unpack_logprobs

# Of one episode, in one look. A later call, and older statements, are looked at from themselves on.
MOST_CALLS: Final = 1000
MOST_STATEMENTS: Final = 1000
# Of one request or reply that is taken apart to be shown; a larger one is shown as bytes.
LARGEST_SHOWN: Final = 1024 * 1024
ANY_SIZE: Final = 2**31 - 1
# Of the texts and ids of an update whose credit is computed again while somebody waits.
LARGEST_EXPLAINED: Final = 32 * 1024 * 1024


class EpisodeDetail(Record, frozen=True, kw_only=True):
    """Hold an episode without the texts of its calls.

    `calls`, `statements` and `fates` are rows of the queries below. `tools` says whose tool events
    are; of a part of the calls it is not known which are nobody's. `earlier_calls`
    counts those before, without repeated ones; `goes_on_from` is the first one after.
    """

    id: UUID
    key: str
    aliases: tuple[str, ...]
    task: str | None
    split: str
    quarantined_reason: str | None
    deleted_at: datetime | None
    calls: Sequence[Row[Any]]
    goes_on_from: UUID | None
    earlier_calls: int
    tools: Told
    statements: Sequence[Row[Any]]
    fates: Sequence[Row[Any]]


_PARTS: Final = text(
    """
    SELECT id, key, root, method, task, joined_task, split, joined_split, quarantined_reason,
        deleted_at, first_call_id, last_call_id
    FROM episodes WHERE id = :whole OR root = :whole ORDER BY first_call_id
    """
)
_WHOLE: Final = text("SELECT COALESCE(root, id) FROM episodes WHERE id = :id")
# Calls without their texts; sizes are in bytes, of bodies that are JSON or not.
_HEADS: Final = text(
    f"""
    SELECT id, parent_id, retry_of, agent, dialect, policy, policy_version, served_model, status,
        http_status, finish, confidence, trainable, reason, started_at, total_ms, text_digest,
        CAST(tool_calls AS text) AS tool_calls,
        COALESCE(octet_length(request) + COALESCE(request_prefix + request_suffix, 0),
            octet_length(request_raw), 0) AS request_bytes,
        COALESCE(octet_length(reply), octet_length(reply_raw), 0) AS reply_bytes,
        (octet_length(prompt_ids) + COALESCE(prompt_prefix, 0)) / {ITEM_BYTES} AS prompt_tokens,
        octet_length(sampled_ids) / {ITEM_BYTES} AS sampled_tokens
    FROM transitions WHERE episode_id = ANY(:parts) AND id BETWEEN :since AND :last
    ORDER BY id LIMIT {MOST_CALLS + 1}
    """
)
_BEFORE: Final = text(
    "SELECT count(*) FROM transitions WHERE episode_id = ANY(:parts) AND id >= :first"
    " AND id < :since AND retry_of IS NULL"
)
_EVENTS: Final = text(
    f"""
    SELECT id, asked_by, tool_id, name, status, detail, ms, source, quotes, at
    FROM tool_events WHERE episode_id = ANY(:parts) ORDER BY at, id LIMIT {4 * MOST_CALLS}
    """
)
# The newest ones; in the order in which they were made. `call` is null where a statement is about
# the whole episode, and `who` where it came without an API key. Those that no later one of their
# metric replaced count.
_STATEMENTS: Final = text(
    f"""
    SELECT *, at = max(at) OVER (PARTITION BY call, metric) AS counts,
        COALESCE(at > (SELECT min(u.claimed_at) FROM consumptions c JOIN updates u
            ON u.id = c.update_id WHERE c.episode_id = :whole AND c.trained), false) AS late
    FROM (
        SELECT f.id, f.metric, f.value, f.label, f.at, COALESCE(k.name, r.api_key) AS who,
            CASE WHEN e.method = '{OWN_EPISODE}' THEN NULL ELSE f.call_id END AS call
        FROM feedback f JOIN episodes e ON e.id = f.episode_id
            JOIN feedback_requests r ON r.id = f.request_id
            LEFT JOIN api_keys k ON k.id = r.api_key
        WHERE f.episode_id = ANY(:parts) ORDER BY f.at DESC, f.id DESC LIMIT {MOST_STATEMENTS}) s
    ORDER BY at, id
    """
)
_POLICIES: Final = text(
    "SELECT policy FROM episode_policies WHERE episode_id = :whole ORDER BY policy"
)
# What became of an episode for one policy, or what it waits for: the update that consumed or holds
# it, the version that it made, how many scored attempts at its task wait with it, and of how many
# the policy's last update took groups.
_FATE: Final = text(
    f"""
    SELECT p.policy, p.version, p.latest, p.lacks, p.rolled_back, p.set_aside,
        p.scored_at IS NOT NULL OR p.call_scored_at IS NOT NULL AS scored,
        u.id AS update_id, u.state AS update_state, u.version AS made, v.state AS made_state,
        c.trained, c.reason, COALESCE(c.at, u.claimed_at) AS at,
        CAST(u.metrics #>> ARRAY['off_policy_episodes', CAST(p.episode_id AS text)]
            AS double precision) AS effective_sample,
        (SELECT l.group_size FROM updates l WHERE l.policy = p.policy
            ORDER BY l.claimed_at DESC LIMIT 1) AS group_size,
        (SELECT count(*) FROM episode_policies
            WHERE policy = p.policy AND task = p.task AND scored_at IS NOT NULL AND {FREE}) AS ready
    FROM (
        SELECT *, {HAS_ROLLED_BACK} AS rolled_back, NOT ({NOT_ASIDE}) AS set_aside
        FROM episode_policies WHERE episode_id = :whole AND policy = :policy) p
        LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
        LEFT JOIN updates u ON u.id = COALESCE(c.update_id, p.claimed_by)
        LEFT JOIN policies v ON (v.name, v.version) = (u.policy, u.version)
    """
)


async def episode_detail(
    connection: AsyncConnection, episode: UUID, since: UUID | None = None
) -> EpisodeDetail | None:
    """Return an episode, or the whole one that it is a part of; None if there is none.

    Its calls are those from `since` on (None: from the first), `MOST_CALLS` at most.

    Raises:
        Damaged: the tool calls of a call cannot be read.
    """
    whole = await connection.scalar(_WHOLE, {"id": episode})
    if whole is None:
        return None
    parts = (await connection.execute(_PARTS, {"whole": whole})).all()
    head = next((part for part in parts if part.root is None), parts[0])
    ids = [part.id for part in parts]
    first, last = parts[0].first_call_id, max(part.last_call_id for part in parts)
    spans = {"parts": ids, "first": first, "since": since or first, "last": last}
    rows = (await connection.execute(_HEADS, spans)).all()
    events = (await connection.execute(_EVENTS, {"parts": ids})).all()
    calls = rows[:MOST_CALLS]
    statements = await connection.execute(_STATEMENTS, {"parts": ids, "whole": whole})
    policies = (await connection.execute(_POLICIES, {"whole": whole})).scalars().all()
    fates = [
        (await connection.execute(_FATE, {"whole": whole, "policy": policy})).one()
        for policy in policies
    ]
    return EpisodeDetail(
        id=whole,
        key=head.key,
        aliases=tuple(part.key for part in parts if part is not head),
        task=head.joined_task or head.task,
        split=head.joined_split or head.split,
        quarantined_reason=head.quarantined_reason,
        deleted_at=head.deleted_at,
        calls=calls,
        goes_on_from=rows[MOST_CALLS].id if len(rows) > MOST_CALLS else None,
        earlier_calls=await connection.scalar(_BEFORE, spans) or 0 if since else 0,
        tools=tools_of(calls, events),
        statements=statements.all(),
        fates=fates,
    )


# The texts of a few calls


class CallTexts(NamedTuple):
    """Hold a call's bodies; None: it has none, or one that is larger than `LARGEST_SHOWN`."""

    request: bytes | None
    reply: bytes | None


# Each id once: the comparison of bodies that `UNION` would make is left out. The planner takes a
# chain for long, and would read all calls for it: with a limit each one is looked up by its id.
_CHAIN: Final = text(
    """
    WITH RECURSIVE chain AS (
        SELECT id, parent_id FROM transitions WHERE id = ANY(:ids)
            AND octet_length(request) + COALESCE(request_prefix + request_suffix, 0) <= :most
        UNION SELECT t.* FROM chain c CROSS JOIN LATERAL (
            SELECT id, parent_id FROM transitions WHERE id = c.parent_id LIMIT 1) t)
    SELECT t.* FROM chain c CROSS JOIN LATERAL (
        SELECT id, parent_id, request, request_prefix, request_suffix
        FROM transitions WHERE id = c.id LIMIT 1) t
    """
)
_REPLIES: Final = text(
    f"""
    SELECT id, CASE WHEN octet_length(reply) <= {LARGEST_SHOWN} THEN reply END AS reply
    FROM transitions WHERE id = ANY(:ids)
    """
)


async def call_texts(connection: AsyncConnection, calls: Collection[UUID]) -> dict[UUID, CallTexts]:
    """Return the bodies of these calls."""
    requests = await _requests(connection, calls, LARGEST_SHOWN)
    rows = await connection.execute(_REPLIES, {"ids": list(calls)})
    return {row.id: CallTexts(requests.get(row.id), row.reply) for row in rows}


async def _requests(
    connection: AsyncConnection, wanted: Collection[UUID], most: int
) -> dict[UUID, bytes]:
    """Return the whole requests of these calls: those that can be made, and are not larger."""
    rows = await connection.execute(_CHAIN, {"ids": list(wanted), "most": most})
    return whole_requests({row.id: row for row in rows}, wanted)


def whole_requests(rows: Mapping[UUID, Any], wanted: Collection[UUID]) -> dict[UUID, bytes]:
    """Return the whole request of each wanted call that can be made (pure).

    `rows` are those calls, and all that they add to. Each is made of the nearest one before it that
    is made already; what lies between is not kept.
    """
    whole: dict[UUID, bytes] = {}
    for call in sorted(wanted):
        chain: dict[UUID, Any] = {}
        at: UUID | None = call
        while at is not None and at in rows and at not in whole and at not in chain:
            chain[at] = rows[at]
            at = rows[at].parent_id
        body = None if at is None else whole.get(at)
        for row in reversed(chain.values()):
            body = row.request if row.parent_id is None else _rebuilt(row, body)
        if body is not None:
            whole[call] = body
    return whole


def _rebuilt(row: Any, base: bytes | None) -> bytes | None:
    """Return a request that is stored as an addition; None if it cannot be read back."""
    if None in (base, row.request, row.request_prefix, row.request_suffix):
        return None
    try:
        return rebuild(base or b"", row.request_prefix, row.request_suffix, row.request)
    except ValueError:
        return None


class CallTokens(Record, frozen=True, kw_only=True):
    """Hold what a call sampled, with its policy's base `model`, whose ids these are.

    Shapes: `sampled_ids` (S,), `sampled_logprobs` (S,) or none, in nats; `log_ratios` (S,) or none,
    of the policy that was trained on the call, before, to the one that sampled it. `update_id` is
    the update that consumed its episode for its policy, if any did.
    """

    id: UUID
    model: str
    trainable: bool
    reason: str | None
    sampled_ids: Sequence[int]
    sampled_logprobs: Sequence[float]
    log_ratios: Sequence[float]
    update_id: UUID | None


_TOKENS: Final = text(
    """
    SELECT t.id, COALESCE(p.served_name, t.served_model, '') AS model, t.trainable, t.reason,
        t.sampled_ids, t.sampled_logprobs, t.policy_logprobs, e.key, c.update_id
    FROM transitions t JOIN episodes e ON e.id = t.episode_id
        LEFT JOIN policies p ON p.name = t.policy AND p.version = 0
        LEFT JOIN consumptions c
            ON c.episode_id = COALESCE(e.root, e.id) AND c.policy = t.policy
    WHERE t.id = :id
    """
)
_RAW: Final = text(
    """
    SELECT e.key, CASE WHEN :part = 'reply' THEN COALESCE(t.reply, t.reply_raw)
        ELSE t.request_raw END AS body
    FROM transitions t JOIN episodes e ON e.id = t.episode_id WHERE t.id = :id
    """
)


async def call_tokens(
    connection: AsyncConnection, call: UUID, tenant: str | None
) -> CallTokens | None:
    """Return what a call sampled; None if there is none, or it is another tenant's.

    `tenant` is None for who sees all.
    """
    row = (await connection.execute(_TOKENS, {"id": call})).first()
    if row is None or tenant not in (None, tenant_of(row.key)):
        return None
    sampled = unpack_logprobs(row.sampled_logprobs)
    policy = unpack_logprobs(row.policy_logprobs or b"") if sampled else []
    return CallTokens(
        id=row.id,
        model=row.model,
        trainable=row.trainable,
        reason=row.reason,
        sampled_ids=unpack_ids(row.sampled_ids),
        sampled_logprobs=sampled,
        log_ratios=[now - then for now, then in zip(policy, sampled, strict=bool(policy))],
        update_id=row.update_id,
    )


async def raw_body(
    connection: AsyncConnection, call: UUID, part: str, tenant: str | None
) -> bytes | None:
    """Return a call's `request` or `reply`, byte for byte as it is kept.

    None: there is no such call, it is another tenant's, or it has no such part.
    """
    row = (await connection.execute(_RAW, {"id": call, "part": part})).first()
    if row is None or tenant not in (None, tenant_of(row.key)):
        return None
    if part == "request" and row.body is None:
        return (await _requests(connection, [call], ANY_SIZE)).get(call)
    body: bytes | None = row.body
    return body


# The attempts at one task


# Those that are compared side by side, and how many calls of each.
MOST_ATTEMPTS: Final = 16
FIRST_CALLS: Final = 4

_ATTEMPTS: Final = text(
    f"""
    SELECT e.id, e.key, p.version, p.latest, p.reward, p.failed, c.trained, c.reason,
        p.scored_at IS NOT NULL OR p.call_scored_at IS NOT NULL AS scored,
        t.calls, t.sampled_tokens, t.began_at, t.ended_at
    FROM (SELECT * FROM episode_policies
          WHERE policy = :policy AND task = :task AND (
              claimed_by = :update OR CAST(:update AS uuid) IS NULL AND {FREE})
          ORDER BY episode_id DESC LIMIT {MOST_ATTEMPTS}) p
    JOIN episodes e ON e.id = p.episode_id AND e.deleted_at IS NULL
    LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
    CROSS JOIN LATERAL (
        SELECT count(*) AS calls, COALESCE(sum(octet_length(t.sampled_ids)), 0)
                / {ITEM_BYTES} AS sampled_tokens, min(t.started_at) AS began_at,
            max(t.started_at + make_interval(secs => t.total_ms / 1000)) AS ended_at
        FROM episodes part JOIN transitions t ON t.episode_id = part.id
            AND t.id BETWEEN part.first_call_id AND part.last_call_id
        WHERE part.id = e.id OR part.root = e.id) t
    WHERE t.calls > 0 ORDER BY e.first_call_id
    """
)
_GROUP_UPDATES: Final = text(
    """
    SELECT u.id, u.state, u.version, u.claimed_at, count(*) AS attempts
    FROM episode_policies p JOIN updates u ON u.id = p.claimed_by
    WHERE p.policy = :policy AND p.task = :task
    GROUP BY u.id ORDER BY u.claimed_at DESC LIMIT 20
    """
)
_FIRST_CALLS: Final = text(
    f"""
    SELECT w.id AS episode, t.id, t.parent_id, t.agent, t.dialect
    FROM unnest(CAST(:ids AS uuid[])) AS w (id) CROSS JOIN LATERAL (
        SELECT t.id, t.parent_id, t.agent, t.dialect
        FROM episodes part JOIN transitions t ON t.episode_id = part.id
            AND t.id BETWEEN part.first_call_id AND part.last_call_id
        WHERE part.id = w.id OR part.root = w.id ORDER BY t.id LIMIT {FIRST_CALLS}) t
    """
)
# How large the requests, replies and ids of episodes are, made whole.
_BYTES: Final = text(
    """
    SELECT sum(COALESCE(octet_length(t.request) + COALESCE(t.request_prefix + t.request_suffix, 0),
            0) + COALESCE(octet_length(t.reply), 0) + octet_length(t.prompt_ids)
        + COALESCE(t.prompt_prefix, 0) + octet_length(t.sampled_ids)
        + octet_length(t.sampled_logprobs))
    FROM episodes part JOIN transitions t ON t.episode_id = part.id
        AND t.id BETWEEN part.first_call_id AND part.last_call_id
    WHERE part.id = ANY(:ids) OR part.root = ANY(:ids)
    """
)


async def attempts(
    connection: AsyncConnection, policy: str, task: str, update: UUID | None
) -> Sequence[Row[Any]]:
    """Return the attempts at a task that an update holds or held; None: those that are free.

    The newest `MOST_ATTEMPTS`, in the order in which they began.
    """
    asked = {"policy": policy, "task": task, "update": update}
    return (await connection.execute(_ATTEMPTS, asked)).all()


async def group_updates(connection: AsyncConnection, policy: str, task: str) -> Sequence[Row[Any]]:
    """Return the updates that hold or held attempts at a task, the newest first."""
    return (await connection.execute(_GROUP_UPDATES, {"policy": policy, "task": task})).all()


async def first_calls(
    connection: AsyncConnection, episodes: Sequence[UUID]
) -> dict[UUID, list[Row[Any]]]:
    """Return the first calls of each episode, `FIRST_CALLS` at most, in their order."""
    by_episode: dict[UUID, list[Row[Any]]] = {episode: [] for episode in episodes}
    for row in await connection.execute(_FIRST_CALLS, {"ids": list(episodes)}):
        by_episode[row.episode].append(row)
    return by_episode


async def is_explainable(connection: AsyncConnection, update: UUID) -> bool:
    """Return whether an update is small enough to compute its credit while somebody waits."""
    size = await connection.scalar(_BYTES, {"ids": await members_of(connection, update)})
    return (size or 0) <= LARGEST_EXPLAINED
