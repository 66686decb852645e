"""Define the tables of what is said about calls and episodes: tool events, feedback, judgements."""

from sqlalchemy import (
    ARRAY,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

from store.records import TARGET_KINDS, TOOL_SOURCES, TOOL_STATUSES
from store.schema.base import When, metadata, one_of

tool_events = Table(
    "tool_events",
    metadata,
    Column("id", Uuid, primary_key=True),
    # Null until the target is seen.
    Column("episode_id", Uuid, ForeignKey("episodes.id")),
    # The call whose reply asked for the tool.
    Column("asked_by", Uuid),
    # The target that feedback named; null if a call stated the event.
    Column("target_kind", Text),
    Column("target", Text),
    Column("tool_id", Text),
    Column("name", Text),
    Column("status", Text, nullable=False),
    Column("detail", Text),
    Column("ms", Double),
    Column("source", Text, nullable=False),
    # Digests of the texts among the tool call's arguments: a call that no reply asked for is
    # matched by them to the reply that it quotes.
    Column("quotes", ARRAY(Uuid)),
    Column("at", When, nullable=False),
    one_of("status", TOOL_STATUSES),
    one_of("target_kind", TARGET_KINDS),
    one_of("source", TOOL_SOURCES),
    Index("ix_tool_events_episode_id", "episode_id"),
    Index(
        "ix_tool_events_pending",
        "target_kind",
        "target",
        postgresql_where=text("episode_id IS NULL"),
    ),
)

# Append-only. The newest statement of a metric about a target counts.
feedback = Table(
    "feedback",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("metric", Text, nullable=False),
    # A number (`true` is 1, `false` 0), or a text in `label`. Both null withdraw what was stated.
    Column("value", Double),
    Column("label", Text),
    Column("target_kind", Text, nullable=False),
    Column("target", Text, nullable=False),
    # Null until the target is seen; `call_id` stays null where the target is an episode.
    Column("episode_id", Uuid, ForeignKey("episodes.id")),
    Column("call_id", Uuid),
    Column("request_id", Uuid, ForeignKey("feedback_requests.id"), nullable=False),
    Column("at", When, nullable=False),
    one_of("target_kind", TARGET_KINDS),
    CheckConstraint("value IS NULL OR label IS NULL", name="one_value"),
    Index("ix_feedback_episode_id", "episode_id"),
    Index("ix_feedback_request_id", "request_id"),
    Index(
        "ix_feedback_pending", "target_kind", "target", postgresql_where=text("episode_id IS NULL")
    ),
)

# One row for each stored POST to /feedback. `api_key` is the id of its key; null if let in without.
feedback_requests = Table(
    "feedback_requests",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("idempotency_key", Text),
    Column("body_hash", Text),
    Column("at", When, nullable=False),
    Column("api_key", Text),
    # Two bodies with one key may both be stored, if their proxies could not reach the database.
    UniqueConstraint("idempotency_key", "body_hash"),
)

# Idempotency keys taken within the last day, including those whose bodies are not stored yet.
feedback_keys = Table(
    "feedback_keys",
    metadata,
    Column("idempotency_key", Text, primary_key=True),
    Column("body_hash", Text, nullable=False),
    Column("at", When, nullable=False, server_default=text("now()")),
    Index("ix_feedback_keys_at", "at"),
)

# The results of asking judges about episodes. A judge is not asked again, or not before `due_at`.
# Its scores are feedback. An episode without a score waits again once it has a call later than
# `last_call_at`.
judgements = Table(
    "judgements",
    metadata,
    Column("episode_id", Uuid, ForeignKey("episodes.id"), primary_key=True),
    Column("judge", Text, primary_key=True),
    Column("outcome", Text, nullable=False),
    Column("reason", Text),
    Column("attempts", Integer, nullable=False),
    Column("last_call_at", When, nullable=False),
    Column("due_at", When),
    Column("at", When, nullable=False, server_default=text("now()")),
    one_of("outcome", ("judged", "cannot_tell", "failed")),
)
