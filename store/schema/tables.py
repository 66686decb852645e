"""The schema: tables, constraints and indexes (docs/decisions/001-ledger.md, 010-storage.md).

`transitions` is partitioned by day through its UUIDv7 key, so that the primary key is `id` alone.
No foreign key refers to it, so that a day can be dropped. It has no foreign keys itself: the check
would add a third to the cost of storing a row, and only `store.write.ingest` writes there.
"""

from sqlalchemy import (
    ARRAY,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from store.records import (
    CALL_STATUSES,
    CONFIDENCES,
    POLICY_STATES,
    TARGET_KINDS,
    TOOL_SOURCES,
    TOOL_STATUSES,
    UPDATE_STATES,
    CallRecord,
)
from store.schema.call_columns import call_columns

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

When = DateTime(timezone=True)
# The condition for an episode that may be claimed. Parts of another episode are claimed and
# consumed with it, and quarantined ones never.
FREE = "claimed_by IS NULL AND root IS NULL AND quarantined_reason IS NULL"


def one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    """Make a CHECK constraint that restricts `column` to `values` (or NULL)."""
    quoted = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({quoted})", name=f"{column}_known")


episodes = Table(
    "episodes",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("key", Text, nullable=False, unique=True),
    Column("method", Text, nullable=False),
    Column("task", Text),
    Column("task_named", Boolean, nullable=False),
    # The call that the task comes from.
    Column("task_from", Uuid),
    Column("policy", Text),
    Column("policy_version", Integer),
    Column("first_call_id", Uuid, nullable=False),
    Column("last_call_id", Uuid, nullable=False),
    Column("last_call_at", When, nullable=False),
    # The last call came to no proper reply (`store.records.has_failed`).
    Column("failed", Boolean, nullable=False, server_default=text("false")),
    # The time of its first reward, and of its newest reward for a single call.
    Column("scored_at", When),
    Column("call_scored_at", When),
    Column("claimed_by", Uuid, ForeignKey("updates.id")),
    # At least one of its calls belongs to it with confidence `doubtful`.
    Column("doubtful", Boolean, nullable=False, server_default=text("false")),
    # The result of `store.link.settle` (docs/decisions/011-joins-in-the-store.md). `root` is the
    # episode that this one is a part of. A part keeps its own values in all other columns, so that
    # the join can be undone. `joined_task` of a root is the task that one of its parts names.
    Column("linked", Boolean, nullable=False, server_default=text("false")),
    Column("root", Uuid),
    Column("joined_task", Text),
    Column("quarantined_reason", Text),
    # Scored episodes that may be claimed, by task; then all that may be claimed once they are
    # scored, by the version that sampled them.
    Index(
        "ix_episodes_ready",
        "policy",
        text("COALESCE(joined_task, task)"),
        text("COALESCE(policy_version, 0)"),
        "scored_at",
        postgresql_where=text(f"scored_at IS NOT NULL AND {FREE}"),
    ),
    Index(
        "ix_episodes_waiting",
        "policy",
        text("COALESCE(policy_version, 0)"),
        "id",
        postgresql_where=text(FREE),
    ),
    Index(
        "ix_episodes_call_scored",
        "policy",
        text("COALESCE(joined_task, task)"),
        text("COALESCE(policy_version, 0)"),
        postgresql_where=text(f"call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE}"),
    ),
    Index(
        "ix_episodes_failed",
        "policy",
        "linked",
        text("COALESCE(joined_task, task)"),
        postgresql_where=text("failed AND scored_at IS NULL AND claimed_by IS NULL"),
    ),
    Index("ix_episodes_claimed_by", "claimed_by", postgresql_where=text("claimed_by IS NOT NULL")),
    Index("ix_episodes_root", "root", postgresql_where=text("root IS NOT NULL")),
    # BRIN, because a later call then changes no index entry (a heap-only tuple update).
    Index("ix_episodes_last_call_at", "last_call_at", postgresql_using="brin"),
)

transitions = Table(
    "transitions",
    metadata,
    *call_columns(CallRecord),
    Column("episode_id", Uuid, nullable=False),
    # JSON bodies, byte for byte. If `parent_id` is set, `request` and `prompt_ids` hold only the
    # bytes that they add to that call's (`store.values.delta`), and these columns count the shared
    # bytes.
    Column("parent_id", Uuid),
    Column("request_prefix", Integer),
    Column("request_suffix", Integer),
    Column("prompt_prefix", Integer),
    Column("request", LargeBinary),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("sampled_logprobs", LargeBinary, nullable=False),
    one_of("status", CALL_STATUSES),
    one_of("confidence", CONFIDENCES),
    CheckConstraint("trainable OR reason IS NOT NULL", name="reason_given"),
    Index("ix_transitions_episode_id", "episode_id"),
    Index("ix_transitions_response_id", "response_id"),
    postgresql_partition_by="RANGE (id)",
)

# Fingerprints of what later calls may repeat (`offers`) and of what calls repeat (`asks`): 16
# bytes, stored as uuid, the smallest type of that size. `links` holds the matches, which are few.
offers = Table(
    "offers",
    metadata,
    Column("digest", Uuid, nullable=False),
    Column("episode_id", Uuid, nullable=False),
    Index("ix_offers_digest", "digest"),
)

asks = Table(
    "asks",
    metadata,
    Column("digest", Uuid, nullable=False),
    Column("call_id", Uuid, nullable=False),
    Column("episode_id", Uuid, nullable=False),
    # 0 is the surest. Only the matches of a call's lowest level that has any count.
    Column("level", Integer, nullable=False),
    Index("ix_asks_digest", "digest"),
    Index("ix_asks_call_id", "call_id"),
)

links = Table(
    "links",
    metadata,
    Column("call_id", Uuid, primary_key=True),
    Column("level", Integer, primary_key=True),
    Column("offered_by", Uuid, primary_key=True),
    Column("asked_by", Uuid, nullable=False),
    # Too many episodes offer the digest: the link is not followed from one episode to another.
    Column("worn", Boolean, nullable=False, server_default=text("false")),
    Index("ix_links_offered_by", "offered_by"),
    Index("ix_links_asked_by", "asked_by"),
)

tool_events = Table(
    "tool_events",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("episode_id", Uuid, ForeignKey("episodes.id")),
    Column("asked_by", Uuid),
    Column("target_kind", Text),
    Column("target", Text),
    Column("tool_id", Text),
    Column("name", Text),
    Column("status", Text, nullable=False),
    Column("detail", Text),
    Column("ms", Double),
    Column("source", Text, nullable=False),
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

feedback = Table(
    "feedback",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("metric", Text, nullable=False),
    Column("value", Double, nullable=False),
    Column("target_kind", Text, nullable=False),
    Column("target", Text, nullable=False),
    # Null until the target is seen; `call_id` stays null where the target is an episode.
    Column("episode_id", Uuid, ForeignKey("episodes.id")),
    Column("call_id", Uuid),
    Column("request_id", Uuid, ForeignKey("feedback_requests.id"), nullable=False),
    Column("at", When, nullable=False),
    one_of("target_kind", TARGET_KINDS),
    Index("ix_feedback_episode_id", "episode_id"),
    Index(
        "ix_feedback_pending", "target_kind", "target", postgresql_where=text("episode_id IS NULL")
    ),
)

feedback_requests = Table(
    "feedback_requests",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("idempotency_key", Text),
    Column("body_hash", Text),
    Column("at", When, nullable=False),
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

policies = Table(
    "policies",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("state", Text, nullable=False),
    Column("served_name", Text, nullable=False, unique=True),
    Column("adapter_path", Text),
    Column("update_id", Uuid, ForeignKey("updates.id"), unique=True),
    Column("created_at", When, nullable=False, server_default=text("now()")),
    Column("changed_at", When, nullable=False, server_default=text("now()")),
    one_of("state", POLICY_STATES),
    CheckConstraint("(version = 0) = (update_id IS NULL)", name="base_or_trained"),
    Index("uq_policies_serving", "name", unique=True, postgresql_where=text("state = 'serving'")),
)

updates = Table(
    "updates",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("policy", Text, nullable=False),
    Column("parent_version", Integer, nullable=False),
    Column("version", Integer),
    Column("state", Text, nullable=False),
    Column("recipe", JSONB, nullable=False),
    Column("metrics", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    # The size up to which its groups are filled with members that were consumed before; the first
    # version whose episodes it may train; and the state of the moving baselines after it.
    Column("group_size", Integer, nullable=False, server_default=text("1")),
    Column("oldest_version", Integer, nullable=False, server_default=text("0")),
    Column("baselines", JSONB),
    Column("claimed_at", When, nullable=False, server_default=text("now()")),
    Column("finished_at", When),
    one_of("state", UPDATE_STATES),
    UniqueConstraint("policy", "version"),
    Index("ix_updates_policy_claimed_at", "policy", "claimed_at"),
    Index("uq_updates_running", "policy", unique=True, postgresql_where=text("state = 'running'")),
)

consumptions = Table(
    "consumptions",
    metadata,
    Column("episode_id", Uuid, ForeignKey("episodes.id"), primary_key=True),
    Column("update_id", Uuid, ForeignKey("updates.id"), nullable=False),
    Column("trained", Boolean, nullable=False),
    Column("reason", Text),
    Column("at", When, nullable=False, server_default=text("now()")),
    CheckConstraint("trained OR reason IS NOT NULL", name="reason_given"),
    Index("ix_consumptions_update_id", "update_id"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("key_hash", LargeBinary, nullable=False, unique=True),
    Column("scopes", ARRAY(Text), nullable=False),
    Column("created_at", When, nullable=False, server_default=text("now()")),
    Column("revoked_at", When),
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
