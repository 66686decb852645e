"""Read one episode for the console, in bounded parts.

An episode may have hundreds of calls of megabytes. Its calls are read first without their texts;
the texts of a few calls are read afterwards. A request may be stored as an addition to another, so
whole requests are rebuilt one after the other, and only the wanted ones are kept.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.claim_query import HAS_ROLLED_BACK, OUTSIDE_FAULT_TIMES
from store.claims import episodes_of_claim
from store.read.assembly import ToolsByCall, assign_tools, full_request, rebuild_calls
from store.records import OWN_EPISODE, Record
from store.tenants import tenant_of
from store.values.packing import ITEM_BYTES

# Most calls, from a given one on, and most statements, the newest, that are read of an episode.
MOST_CALLS: Final = 1000
MOST_STATEMENTS: Final = 1000
# Most bytes of a request or reply that is parsed to be shown; a larger one is shown as bytes.
LARGEST_SHOWN: Final = 1024 * 1024
ANY_SIZE: Final = 2**31 - 1
# Most bytes of texts and ids of an update whose credit is recomputed for a waiting person.
LARGEST_EXPLAINED: Final = 32 * 1024 * 1024


class EpisodeDetail(Record, frozen=True, kw_only=True):
    """An episode without the texts of its calls.

    `calls`, `statements` and `fates` are rows of `_HEADS`, `_STATEMENTS` and `_FATES`. `tools`
    assigns tool events to `calls`; an event of a call that was not read counts as an event of no
    call. `earlier_calls` counts the calls before `calls`, without retries; `goes_on_from` is the id
    of the first call after them, None if there is none.
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
    tools: ToolsByCall
    statements: Sequence[Row[Any]]
    fates: Sequence[Row[Any]]


_PARTS: Final = text(
    """
    SELECT p.*, whole
    FROM episodes p, (SELECT COALESCE(root, id) AS whole FROM episodes WHERE id = :id) w
    WHERE p.id = whole OR p.root = whole ORDER BY first_call_id
    """
)
# Calls without their texts; sizes are in bytes, of bodies that are JSON or not.
_HEADS: Final = text(
    f"""
    SELECT id, parent_id, retry_of, agent, lane, policy, policy_version, served_model, status,
        http_status, finish, confidence, trainable, reason, side, started_at, total_ms, text_digest,
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
# The newest statements, in the order of their times. `call` is null where a statement is about the
# whole episode, and `who` where no judge made it and it came without an API key. A statement counts
# unless a later one of its metric, or a fact, replaces it (`store.values.rewards`).
_STATEMENTS: Final = text(
    f"""
    SELECT *,
        CASE WHEN max(at) FILTER (WHERE is_fact AND value IS NULL AND label IS NULL) OVER about
            IS DISTINCT FROM max(at) FILTER (WHERE is_fact) OVER about
            THEN is_fact AND at = max(at) FILTER (WHERE is_fact) OVER about
            ELSE at = max(at) OVER about END AS counts,
        COALESCE(at > (SELECT min(u.claimed_at) FROM consumptions c JOIN updates u
            ON u.id = c.update_id WHERE c.episode_id = :whole AND c.trained), false) AS late
    FROM (
        SELECT f.id, f.metric, f.value, f.label, f.correction, f.at, f.source IS NULL AS is_fact,
            COALESCE(f.source, k.name, r.api_key) AS who,
            CASE WHEN e.method = '{OWN_EPISODE}' THEN NULL ELSE f.call_id END AS call
        FROM feedback f JOIN episodes e ON e.id = f.episode_id
            JOIN feedback_requests r ON r.id = f.request_id
            LEFT JOIN api_keys k ON k.id = r.api_key
        WHERE f.episode_id = ANY(:parts) ORDER BY f.at DESC, f.id DESC LIMIT {MOST_STATEMENTS}) s
    WINDOW about AS (PARTITION BY call, metric)
    ORDER BY at, id
    """
)
_OWN: Final = "episode_policies.policy"
# An episode's outcome for each policy: the update that consumed or holds it, and the version that
# the update made.
_FATES: Final = text(
    f"""
    SELECT p.policy, p.version, p.latest, p.lacks, p.rolled_back, p.in_fault_time,
        p.scored_at IS NOT NULL OR p.call_scored_at IS NOT NULL AS scored,
        u.id AS update_id, u.state AS update_state, u.version AS made, v.state AS made_state,
        c.trained, c.reason, COALESCE(c.at, u.claimed_at) AS at,
        CAST(u.metrics #>> ARRAY['off_policy_episodes', CAST(p.episode_id AS text)]
            AS double precision) AS effective_sample
    FROM (
        SELECT *, {HAS_ROLLED_BACK.replace(":policy", _OWN)} AS rolled_back,
            NOT ({OUTSIDE_FAULT_TIMES.replace(":policy", _OWN)}) AS in_fault_time
        FROM episode_policies WHERE episode_id = :whole) p
        LEFT JOIN consumptions c ON (c.episode_id, c.policy) = (p.episode_id, p.policy)
        LEFT JOIN updates u ON u.id = COALESCE(c.update_id, p.claimed_by)
        LEFT JOIN policies v ON (v.name, v.version) = (u.policy, u.version)
    ORDER BY p.policy
    """
)


async def episode_detail(
    connection: AsyncConnection, episode: UUID, since: UUID | None = None
) -> EpisodeDetail | None:
    """Return an episode, or the joined episode that it is a part of; None if there is none.

    Its calls are those from `since` on (None: from the first), `MOST_CALLS` at most.

    Raises:
        Damaged: the tool calls of a call cannot be read.
    """
    parts = (await connection.execute(_PARTS, {"id": episode})).all()
    if not parts:
        return None
    whole = parts[0].whole
    head = next((part for part in parts if part.root is None), parts[0])
    ids = [part.id for part in parts]
    first, last = parts[0].first_call_id, max(part.last_call_id for part in parts)
    spans = {"parts": ids, "first": first, "since": since or first, "last": last}
    rows = (await connection.execute(_HEADS, spans)).all()
    events = (await connection.execute(_EVENTS, {"parts": ids})).all()
    calls = rows[:MOST_CALLS]
    statements = await connection.execute(_STATEMENTS, {"parts": ids, "whole": whole})
    fates = (await connection.execute(_FATES, {"whole": whole})).all()
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
        tools=assign_tools(calls, events),
        statements=statements.all(),
        fates=fates,
    )


# The texts of a few calls


class CallTexts(NamedTuple):
    """A call's bodies; None: none is stored, it is damaged or too large, or was not wanted."""

    request: bytes | None
    reply: bytes | None


# The recursion reads ids alone, so that `UNION` compares no bodies. The planner expects a long
# chain, and would read all calls: with LIMIT each call is looked up by its id.
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
    """
    SELECT id, CASE WHEN octet_length(reply) <= :most THEN reply END AS reply
    FROM transitions WHERE id = ANY(:ids)
    """
)


async def call_texts(
    connection: AsyncConnection,
    requests: Collection[UUID],
    replies: Collection[UUID],
    most: int = LARGEST_SHOWN,
) -> dict[UUID, CallTexts]:
    """Return these calls' requests and replies, but for any body of over `most` bytes."""
    request_of = await _requests(connection, requests, most)
    rows = await connection.execute(_REPLIES, {"ids": list(replies), "most": most})
    reply_of = {row.id: row.reply for row in rows}
    return {
        call: CallTexts(request_of.get(call), reply_of.get(call))
        for call in {*request_of, *reply_of}
    }


async def _requests(
    connection: AsyncConnection, wanted: Collection[UUID], most: int
) -> dict[UUID, bytes]:
    """Return these calls' whole requests, but for damaged ones and any of over `most` bytes."""
    rows = await connection.execute(_CHAIN, {"ids": list(wanted), "most": most})
    made, _ = rebuild_calls(rows.all(), wanted, full_request)
    return made


# The calls of an episode in a list: the first, whose request has the question, and the last.
_ENDS: Final = text(
    """
    SELECT COALESCE(root, id) AS episode,
        (array_agg(first_call_id ORDER BY first_call_id))[1] AS first,
        (array_agg(last_call_id ORDER BY last_call_id DESC))[1] AS last
    FROM episodes WHERE id = ANY(:ids) OR root = ANY(:ids) GROUP BY 1
    """
)


async def first_and_last_calls(
    connection: AsyncConnection, episodes: Collection[UUID]
) -> Sequence[Row[Any]]:
    """Return the ids of the `first` and the `last` call of each `episode`."""
    return (await connection.execute(_ENDS, {"ids": list(episodes)})).all()


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
) -> Row[Any] | None:
    """Return a call's sampled ids and log-probabilities, packed, and the base `model` of the ids.

    None: there is no such call, or it is another tenant's (`tenant` None: any). `update_id` is the
    update that consumed the call's episode for the call's policy, if any did.
    """
    row = (await connection.execute(_TOKENS, {"id": call})).first()
    return None if row is None or tenant not in (None, tenant_of(row.key)) else row


async def raw_body(
    connection: AsyncConnection, call: UUID, part: str, tenant: str | None
) -> bytes | None:
    """Return a call's `request` or `reply`, byte for byte as recorded.

    None: there is no such call, it is another tenant's, or it has no such part.
    """
    row = (await connection.execute(_RAW, {"id": call, "part": part})).first()
    if row is None or tenant not in (None, tenant_of(row.key)):
        return None
    if part == "request" and row.body is None:
        return (await _requests(connection, [call], ANY_SIZE)).get(call)
    body: bytes | None = row.body
    return body


# The credit of an update

# Bytes of the whole requests, replies, ids and log-probabilities of episodes.
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


async def is_explainable(connection: AsyncConnection, update: UUID) -> bool:
    """Return whether an update is small enough to recompute its credit while a person waits."""
    size = await connection.scalar(_BYTES, {"ids": await episodes_of_claim(connection, update)})
    return (size or 0) <= LARGEST_EXPLAINED
