"""Define the tables of the database.

In this order: recorded calls and episodes, what each policy may claim, feedback, versions and
updates, and API keys (docs/decisions/001-order-free-ledger.md).
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
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
    ARMS,
    CALL_STATUSES,
    CONFIDENCES,
    EVAL,
    SPLITS,
    TARGET_KINDS,
    TOOL_SOURCES,
    TOOL_STATUSES,
    TRAIN,
    UPDATE_STATES,
    CallRecord,
    ColumnField,
    Record,
    column_fields,
)
from store.tenants import DEFAULT
from store.versions import ACTORS, POLICY_STATES

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


def one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    """Return a CHECK constraint that allows only `values`, or NULL, in `column`."""
    quoted = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({quoted})", name=f"{column}_known")


# Calls, their episodes, and the links that join episodes


# The type of a call's column, by the type of the record's field.
TYPES: Final[Mapping[Any, Any]] = {
    UUID: Uuid,
    str: Text,
    int: Integer,
    float: Double,
    bool: Boolean,
    bytes: LargeBinary,
    datetime: DateTime(timezone=True),
}


def call_columns(record: type[Record]) -> list[Column[Any]]:
    """Return a column for each field of a call's record that is marked with `StoredColumn`.

    Raises:
        TypeError: `TYPES` has no column type for a field's type.
    """
    return [_column(record, field) for field in column_fields(record)]


def _column(record: type[Record], field: ColumnField) -> Column[Any]:
    if not field.column.json and field.type not in TYPES:
        raise TypeError(
            f"{record.__name__}.{field.name} is a {field.type}, for which no type of column is "
            f"known; mark it as json, or add the type to {__name__}.TYPES"
        )
    return Column(
        field.name,
        JSON(none_as_null=field.null) if field.column.json else TYPES[field.type],
        primary_key=field.name == "id",
        nullable=field.null,
        doc=field.column.about or None,
    )


# The split of a whole episode: `eval` if any call of any of its parts says so.
SPLIT = "COALESCE(joined_split, split)"
# The condition for an episode that policies may claim. Parts of another episode are claimed and
# consumed with it; quarantined, evaluation and deleted episodes never are.
CLAIMABLE = (
    f"root IS NULL AND quarantined_reason IS NULL AND {SPLIT} = '{TRAIN}' AND deleted_at IS NULL"
)
# The condition for a call that can be trained once the version that sampled it has computed its
# log-probabilities.
WITHOUT_LOGPROBS = "trainable AND octet_length(sampled_logprobs) = 0"
# The condition for a call that a trained version served, and not its base model.
OF_A_VERSION = "policy_version > 0"

episodes = Table(
    "episodes",
    metadata,
    Column("id", Uuid, primary_key=True),
    # The name that the client gave, with its namespace, or the id of the first call. Names of other
    # tenants than the default one begin with the tenant and U+001F, in `task`, `response_id`,
    # `target` and `idempotency_key` too. A deleted episode has the digest of its name.
    Column("key", Text, nullable=False, unique=True),
    # How the first call was assigned to the episode, such as `header` or `own`.
    Column("method", Text, nullable=False),
    Column("task", Text),
    # Whether a client named the task, and the call that the task comes from.
    Column("task_named", Boolean, nullable=False),
    Column("task_from", Uuid),
    # The policy version that served the first call.
    Column("policy", Text),
    Column("policy_version", Integer),
    Column("first_call_id", Uuid, nullable=False),
    Column("last_call_id", Uuid, nullable=False),
    Column("last_call_at", When, nullable=False),
    # The last call was refused because of its content (`store.records.FAILED_STATUSES`).
    Column("failed", Boolean, nullable=False, server_default=text("false")),
    # The time of its first reward, and of its newest reward for a single call.
    Column("scored_at", When),
    Column("call_scored_at", When),
    # Its newest reward (of equally new ones the lowest); null before the first, or if withdrawn.
    Column("reward", Double),
    # A call belongs to it with confidence `doubtful`, or a call of it was or may have been lost.
    Column("doubtful", Boolean, nullable=False, server_default=text("false")),
    # The result of `store.link.settle` (docs/decisions/012-identity.md). `root` is the
    # episode that this one is a part of. A part keeps its own values in all other columns, so that
    # the join can be undone. `joined_task` of a root is the task that one of its parts names.
    Column("linked", Boolean, nullable=False, server_default=text("false")),
    Column("root", Uuid),
    Column("joined_task", Text),
    # `split` is `eval` if one of the episode's own calls says so; `joined_split`, if a call of any
    # joined episode does. Episodes of evaluation are never claimed.
    Column("split", Text, nullable=False, server_default=text(f"'{TRAIN}'")),
    Column("joined_split", Text),
    # Why the episode is never claimed; null if it may be.
    Column("quarantined_reason", Text),
    # Only this row is left of the episode, for consumptions and other episodes' links
    # (docs/decisions/070-deleting-episodes.md).
    Column("deleted_at", When),
    # Evaluation by policy: the rewards of each version.
    Index(
        "ix_episodes_eval",
        "policy",
        "policy_version",
        postgresql_where=text(f"{SPLIT} = '{EVAL}'"),
    ),
    Index("ix_episodes_root", "root", postgresql_where=text("root IS NOT NULL")),
    # The search for outdated episodes goes in the order of ids, which never change.
    Index("ix_episodes_there", "id", postgresql_where=text("deleted_at IS NULL")),
    # The few episodes whose first call was stored after a later one.
    Index(
        "ix_episodes_first_call_id",
        "first_call_id",
        postgresql_where=text("first_call_id <> id"),
    ),
    # BRIN, because a later call then changes no index entry (a heap-only tuple update).
    Index("ix_episodes_last_call_at", "last_call_at", postgresql_using="brin"),
    one_of("split", SPLITS),
    one_of("joined_split", SPLITS),
)

# Partitioned by day through its UUIDv7 key, so that the primary key is `id` alone. No foreign key
# refers to it, so that a day can be dropped. It has no foreign keys itself: the check would add a
# third to the cost of storing a row, and only `store.write.ingest` writes there.
transitions = Table(
    "transitions",
    metadata,
    *call_columns(CallRecord),
    Column("episode_id", Uuid, nullable=False),
    # JSON bodies, byte for byte. If `parent_id` is set, `request` and `prompt_ids` have only the
    # additions to that call's (`store.values.packing`), and `request_prefix`, `request_suffix` and
    # `prompt_prefix` count the shared bytes.
    Column("parent_id", Uuid),
    Column("request_prefix", Integer),
    Column("request_suffix", Integer),
    Column("prompt_prefix", Integer),
    Column("request", LargeBinary),
    # Token ids are little-endian int32; log-probabilities are little-endian float32, in nats. They
    # are empty if the server gave none: then the trainer computes them.
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("sampled_logprobs", LargeBinary, nullable=False),
    # Log-probabilities of the sampled ids under the policy as it was first trained on the call,
    # before that step of an update.
    Column("policy_logprobs", LargeBinary),
    one_of("status", CALL_STATUSES),
    one_of("confidence", CONFIDENCES),
    one_of("split", SPLITS),
    one_of("arm", ARMS),
    CheckConstraint("trainable OR reason IS NOT NULL", name="reason_given"),
    Index("ix_transitions_episode_id", "episode_id"),
    Index("ix_transitions_response_id", "response_id"),
    # The newest calls of each trained version, which tell whether it is in use.
    Index(
        "ix_transitions_called",
        "policy",
        "policy_version",
        "id",
        postgresql_where=text(OF_A_VERSION),
    ),
    Index(
        "ix_transitions_without_logprobs",
        "policy",
        "policy_version",
        postgresql_where=text(WITHOUT_LOGPROBS),
    ),
    postgresql_partition_by="RANGE (id)",
)

# `provided_fingerprints`: parts of a call that later calls may repeat, such as the id of a tool
# call. `needed_fingerprints`: parts of earlier calls that a call repeats, if its proxy could not
# join it to an episode. A fingerprint has 16 bytes and is stored as uuid, the smallest type of that
# size. `links` holds the matches, which are few. `common_fingerprints`: too many episodes provide
# these, so needs of them are not looked up again.
provided_fingerprints = Table(
    "provided_fingerprints",
    metadata,
    Column("digest", Uuid, nullable=False),
    Column("episode_id", Uuid, nullable=False),
    Index("ix_provided_fingerprints_digest", "digest"),
    # BRIN, because it is looked up when an episode is deleted, and every call adds rows.
    Index("ix_provided_fingerprints_episode_id", "episode_id", postgresql_using="brin"),
)

common_fingerprints = Table(
    "common_fingerprints", metadata, Column("digest", Uuid, primary_key=True)
)

needed_fingerprints = Table(
    "needed_fingerprints",
    metadata,
    Column("digest", Uuid, nullable=False),
    Column("call_id", Uuid, nullable=False),
    Column("episode_id", Uuid, nullable=False),
    # 0 is the surest. Of a call's levels, only the lowest with a match counts.
    Column("level", Integer, nullable=False),
    Index("ix_needed_fingerprints_digest", "digest"),
    Index("ix_needed_fingerprints_call_id", "call_id"),
    Index("ix_needed_fingerprints_episode_id", "episode_id", postgresql_using="brin"),
)

# Tombstones: the first 16 bytes of the SHA-256 of the kind and name of what was deleted
# (`store.tombstones`). Nothing is stored again under such a name. `deletion` counts deletions: it
# tells a cache of stored calls that some of them may be gone.
deleted_names = Table(
    "deleted_names",
    metadata,
    Column("digest", Uuid, primary_key=True),
    Column("deletion", BigInteger, nullable=False),
    Column("at", When, nullable=False, server_default=text("now()")),
    Index("ix_deleted_names_deletion", "deletion"),
)

# Days that were dropped, and the numbers of their calls: no call up to the last of these days is
# stored any more (`store.retaining`).
dropped_days = Table(
    "dropped_days",
    metadata,
    Column("day", Date, primary_key=True),
    Column("calls", BigInteger, nullable=False),
    Column("at", When, nullable=False, server_default=text("now()")),
)

# Matches of needed and provided fingerprints; from these `store.link` computes which episodes to
# join.
links = Table(
    "links",
    metadata,
    Column("call_id", Uuid, primary_key=True),
    Column("level", Integer, primary_key=True),
    Column("provided_by", Uuid, primary_key=True),
    Column("needed_by", Uuid, nullable=False),
    # Too many episodes provide the digest: the link is not followed from one episode to another.
    Column("too_common", Boolean, nullable=False, server_default=text("false")),
    Index("ix_links_provided_by", "provided_by"),
    Index("ix_links_needed_by", "needed_by"),
)

# Times in which a worker lost records of unknown episodes, extended at both ends
# (`store.link.outages`). Episodes with a call since `called_since` that began before the UUIDv7
# `began_before` was made are quarantined.
recording_outages = Table(
    "recording_outages",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("called_since", When, nullable=False),
    Column("began_before", Uuid, nullable=False),
    Index("ix_recording_outages_began_before", "began_before"),
)


# Claims of each policy, and the terms of its reward


# The condition for an episode that a policy may claim now.
FREE = "claimed_by IS NULL AND claimable"


# The terms of a policy's reward, if its recipe names metrics. A policy without a row has the metric
# `reward`, as in `episodes` (docs/decisions/017-credit.md).
reward_terms = Table(
    "reward_terms",
    metadata,
    Column("policy", Text, primary_key=True),
    Column("metric", Text, primary_key=True),
    # The order in which they are added.
    Column("place", Integer, nullable=False),
    Column("weight", Double, nullable=False),
    Column("low", Double, nullable=False),
    Column("high", Double, nullable=False),
    # The value if the metric was not stated; null: there is no reward then.
    Column("fallback", Double),
    # The values of texts that may be stated.
    Column("texts", JSONB, nullable=False),
)

# One row for each episode and policy that sampled a call of it
# (docs/decisions/041-several-policies.md). All but the versions and the claim is copied from the
# episode (`store.link.claimable`), so that one index finds the episodes ready for a policy.
episode_policies = Table(
    "episode_policies",
    metadata,
    Column("episode_id", Uuid, ForeignKey("episodes.id"), primary_key=True),
    Column("policy", Text, primary_key=True),
    # The lowest and the highest version that served a call under the episode's own key (null: only
    # its other parts have calls of the policy), then the same for the whole episode. Staleness is
    # that of the lowest; the episode goes on with the highest
    # (docs/decisions/041-several-policies.md).
    Column("own_version", Integer),
    Column("own_latest", Integer),
    Column("version", Integer, nullable=False),
    Column("latest", Integer, nullable=False),
    Column("claimed_by", Uuid, ForeignKey("updates.id")),
    # Copied from the episode and its parts; the four columns about rewards are by the policy's own
    # terms, if its recipe has any (`reward_terms`).
    Column("task", Text),
    Column("scored_at", When),
    Column("call_scored_at", When),
    Column("reward", Double),
    # Why there is no reward although a metric of it was stated (`store.values.rewards.Lack`).
    Column("lacks", Text),
    Column("failed", Boolean, nullable=False),
    Column("last_call_at", When, nullable=False),
    Column("claimable", Boolean, nullable=False),
    # Scored episodes that may be claimed, by task and with their rewards, so that the table itself
    # need not be read; then all free episodes, scored or not, by the version that sampled them.
    Index(
        "ix_episode_policies_ready",
        "policy",
        "task",
        "version",
        "scored_at",
        postgresql_include=["reward", "episode_id"],
        postgresql_where=text(f"scored_at IS NOT NULL AND {FREE}"),
    ),
    Index(
        "ix_episode_policies_waiting",
        "policy",
        "version",
        "episode_id",
        postgresql_where=text(FREE),
    ),
    Index(
        "ix_episode_policies_call_scored",
        "policy",
        "task",
        "version",
        postgresql_where=text(f"call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE}"),
    ),
    Index(
        "ix_episode_policies_failed",
        "policy",
        "task",
        postgresql_where=text(f"failed AND scored_at IS NULL AND {FREE}"),
    ),
    Index(
        "ix_episode_policies_lacking",
        "policy",
        "lacks",
        postgresql_where=text(f"lacks IS NOT NULL AND {FREE}"),
    ),
    Index(
        "ix_episode_policies_claimed_by",
        "claimed_by",
        postgresql_where=text("claimed_by IS NOT NULL"),
    ),
)


# Tool events, feedback and judgements

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
    # Digests of the texts among the tool call's arguments: by these, a tool call that no reply
    # asked for is matched to the reply that it quotes.
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

# Append-only. The newest statement of a metric about a target counts, facts before opinions.
feedback = Table(
    "feedback",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("metric", Text, nullable=False),
    # A number (`true` is 1, `false` 0), or a text in `label`. Both null withdraw what was stated.
    Column("value", Double),
    Column("label", Text),
    # The reply that would have been right, beside a value.
    Column("correction", Text),
    Column("target_kind", Text, nullable=False),
    Column("target", Text, nullable=False),
    # Null until the target is seen; `call_id` stays null where the target is an episode.
    Column("episode_id", Uuid, ForeignKey("episodes.id")),
    Column("call_id", Uuid),
    # The judge whose opinion it is; null: a fact.
    Column("source", Text),
    Column("request_id", Uuid, ForeignKey("feedback_requests.id"), nullable=False),
    Column("at", When, nullable=False),
    one_of("target_kind", TARGET_KINDS),
    CheckConstraint("value IS NULL OR label IS NULL", name="one_value"),
    Index("ix_feedback_episode_id", "episode_id"),
    Index("ix_feedback_request_id", "request_id"),
    Index(
        "ix_feedback_source",
        *("source", "target_kind", "id"),
        postgresql_where=text("source IS NOT NULL"),
    ),
    Index(
        "ix_feedback_pending", "target_kind", "target", postgresql_where=text("episode_id IS NULL")
    ),
)

# One row for each stored POST to /feedback. `api_key` is the id of its key; null: it had none.
feedback_requests = Table(
    "feedback_requests",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("idempotency_key", Text),
    Column("body_hash", Text),
    Column("at", When, nullable=False),
    Column("api_key", Text),
    # Two bodies with one key may both be stored, if neither proxy knew of the other's.
    UniqueConstraint("idempotency_key", "body_hash"),
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


# Policy versions, the updates that made them, and the episodes that these consumed

# A key of an update's metrics: the SHA-256 of its version's manifest.
MANIFEST_SHA256: Final = "manifest_sha256"
# A key of an update's metrics: how far its version is from the base model, as KL in nats a token.
KL_TO_BASE: Final = "kl_to_base"
# Keys of an update's metrics: the speed of training; the last two are fractions.
THROUGHPUT: Final = ("tokens_per_second", "mfu", "idle_share")
# The condition for a version that servers have loaded or will load: few of all versions.
LIVE: Final = "state <> 'rejected' AND unloaded_at IS NULL"
# The condition for a version that every server should have (`PolicyVersion.is_servable`).
SERVABLE: Final = f"state <> 'written' AND {LIVE}"
# The condition for the control: at most one of a policy's versions.
CONTROL: Final = "state = 'retired' AND share IS NOT NULL"
# The condition for a version that gets the traffic as soon as it is loaded, by its rule.
PROMOTED_WHEN_LOADED: Final = (
    "COALESCE(gate->>'mode', 'immediate') = 'immediate'"
    " AND NOT COALESCE(CAST(gate->>'approve' AS boolean), false)"
)
# The condition for a version (`p`) that new episodes began with.
HAD_TRAFFIC: Final = """EXISTS (
    SELECT FROM policy_events v WHERE v.name = p.name AND v.version = p.version
        AND v.to_state IN ('serving', 'canary'))"""
# The version that serves the policy `name` after a roll-back of the serving one: the control, or
# the last loaded one that served before. The base model is always loaded, and never rolled back.
ROLLBACK_TARGET: Final = """(
    SELECT r.version FROM policies r
    JOIN policy_events v ON v.name = r.name AND v.version = r.version AND v.to_state = 'serving'
    WHERE r.name = {name} AND r.state = 'retired' AND r.unloaded_at IS NULL
        AND r.ended_at IS NULL AND NOT EXISTS (SELECT FROM policies b
            WHERE b.name = {name} AND b.version = 0 AND b.state = 'serving')
    ORDER BY r.share IS NULL, v.at DESC, v.id DESC LIMIT 1)"""

# One row for each version of a policy; version 0 is the base model.
policies = Table(
    "policies",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    # The policy's tenant, which never changes.
    Column("tenant", Text, nullable=False, server_default=text(f"'{DEFAULT}'")),
    Column("state", Text, nullable=False),
    # The model name on the upstream: `NAME@N`, or the name of the base model.
    Column("served_name", Text, nullable=False),
    # The folder of the adapter and the update that made it; null for version 0.
    Column("adapter_path", Text),
    Column("update_id", Uuid, ForeignKey("updates.id"), unique=True),
    Column("created_at", When, nullable=False, server_default=text("now()")),
    Column("changed_at", When, nullable=False, server_default=text("now()")),
    # The files are gone, as nothing needed them any more; null while they are there.
    Column("files_deleted_at", When),
    # A canary's share of new episodes, or the control's.
    Column("share", Double),
    # The `[publish]` rule of its recipe, by which it is promoted or rolled back.
    Column("gate", JSONB),
    # The time since when servers need not keep it for its episodes; null before.
    Column("unloaded_at", When),
    # The policy's line started again before it (`store.retraining`): it never serves again, nothing
    # is trained from it, and it does not count for staleness.
    Column("ended_at", When),
    # On version 0: only operators change which of the policy's versions has traffic. On another
    # serving version: training is held, as rewards fell.
    Column("frozen_at", When),
    # A person has to promote or reject it; null otherwise.
    Column("awaits_approval_at", When),
    one_of("state", POLICY_STATES),
    CheckConstraint("share >= 0 AND share <= 1", name="share_is_a_share"),
    CheckConstraint("share IS NULL OR state IN ('canary', 'retired')", name="share_is_of_an_arm"),
    CheckConstraint(
        "unloaded_at IS NULL"
        " OR state IN ('retired', 'rolled_back') AND share IS NULL AND version > 0",
        name="unloaded_serves_nobody",
    ),
    CheckConstraint(
        "awaits_approval_at IS NULL OR state IN ('loaded', 'canary')",
        name="approval_is_of_a_candidate",
    ),
    CheckConstraint(
        "ended_at IS NULL OR state IN ('retired', 'rolled_back', 'rejected')",
        name="ended_for_good",
    ),
    CheckConstraint(
        "files_deleted_at IS NULL OR state = 'rejected' OR unloaded_at IS NOT NULL",
        name="deleted_is_not_servable",
    ),
    CheckConstraint("(version = 0) = (update_id IS NULL)", name="base_or_trained"),
    # Several policies may have one base model, and so one name for their version 0.
    Index(
        "uq_policies_served_name",
        "served_name",
        unique=True,
        postgresql_where=text("version > 0"),
    ),
    Index("uq_policies_serving", "name", unique=True, postgresql_where=text("state = 'serving'")),
    Index("uq_policies_canary", "name", unique=True, postgresql_where=text("state = 'canary'")),
    Index("uq_policies_control", "name", unique=True, postgresql_where=text(CONTROL)),
    # Few versions are rolled back, and most policies have none.
    Index(
        "ix_policies_rolled_back",
        "name",
        "version",
        postgresql_where=text("state = 'rolled_back'"),
    ),
    # Queries that run every second must not slow down with the number of versions.
    Index("ix_policies_base", "served_name", postgresql_where=text("version = 0")),
    Index("ix_policies_live", "name", postgresql_where=text(LIVE)),
    Index(
        "ix_policies_unloaded",
        "name",
        "changed_at",
        postgresql_where=text("unloaded_at IS NOT NULL"),
    ),
    Index(
        "ix_policies_with_files",
        "name",
        "version",
        postgresql_where=text("files_deleted_at IS NULL"),
    ),
)

# Each change of a version's state (`store.version_states`); a trigger refuses to alter one.
policy_events = Table(
    "policy_events",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("version", Integer, nullable=False),
    # Null for its first state.
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    # What the decision rested on.
    Column("evidence", JSONB),
    Column("at", When, nullable=False, server_default=text("now()")),
    ForeignKeyConstraint(["name", "version"], ["policies.name", "policies.version"]),
    one_of("from_state", POLICY_STATES),
    one_of("to_state", POLICY_STATES),
    one_of("actor", ACTORS),
    Index("ix_policy_events_version", "name", "version", "id"),
)

updates = Table(
    "updates",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("policy", Text, nullable=False),
    # The version that training starts from, and the one that it made.
    Column("parent_version", Integer, nullable=False),
    Column("version", Integer),
    # `expired`: the update only consumed episodes that could not be trained any more. `abandoned`:
    # its episodes are free again; if it has a version, a retraining ended its line.
    Column("state", Text, nullable=False),
    # The whole recipe, so that an update can be repeated.
    Column("recipe", JSONB, nullable=False),
    Column("metrics", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    # The size up to which its groups are filled with members that were consumed before; the first
    # version whose episodes it may train; how far each judge was trusted (null: there was none);
    # and the state of the moving baselines after it.
    Column("group_size", Integer, nullable=False, server_default=text("1")),
    Column("oldest_version", Integer, nullable=False, server_default=text("0")),
    Column("trust", JSONB),
    Column("baselines", JSONB),
    Column("claimed_at", When, nullable=False, server_default=text("now()")),
    Column("finished_at", When),
    one_of("state", UPDATE_STATES),
    UniqueConstraint("policy", "version"),
    Index("ix_updates_policy_claimed_at", "policy", "claimed_at"),
    Index("uq_updates_running", "policy", unique=True, postgresql_where=text("state = 'running'")),
)

# Times in which a model server was at fault: no update claims episodes that it may have spoilt
# (`store.claim_query`).
fault_times = Table(
    "fault_times",
    metadata,
    Column("policy", Text, primary_key=True),
    # These episodes had a call since then, and began before this UUIDv7 was made.
    Column("called_since", When, primary_key=True),
    Column("began_before", Uuid, nullable=False),
)

# Episodes that an update has consumed, trained or not: each episode once for each policy.
consumptions = Table(
    "consumptions",
    metadata,
    Column("episode_id", Uuid, primary_key=True),
    Column("policy", Text, primary_key=True),
    Column("update_id", Uuid, ForeignKey("updates.id"), nullable=False),
    Column("trained", Boolean, nullable=False),
    # Why it was not trained, such as `stale`, `alone`, `too_long`, `rolled_back` or
    # `left_out`.
    Column("reason", Text),
    Column("at", When, nullable=False, server_default=text("now()")),
    ForeignKeyConstraint(
        ["episode_id", "policy"], ["episode_policies.episode_id", "episode_policies.policy"]
    ),
    CheckConstraint("trained OR reason IS NOT NULL", name="reason_given"),
    Index("ix_consumptions_update_id", "update_id"),
)

# Consumptions of updates that a retraining ended, which freed the episodes (`store.retraining`).
freed_consumptions = Table(
    "freed_consumptions",
    metadata,
    Column("episode_id", Uuid, primary_key=True),
    Column("policy", Text, primary_key=True),
    Column("update_id", Uuid, ForeignKey("updates.id"), primary_key=True),
    Column("trained", Boolean, nullable=False),
    Column("reason", Text),
    Column("at", When, nullable=False),
)


# API keys

# The condition for a key that is not revoked.
NOT_REVOKED: Final = "revoked_at IS NULL"

# A revoked key keeps its row: once there was a key, no request is served without one.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    # The key's tenant: its bearer sees, scores and trains only what belongs to this tenant.
    Column("tenant", Text, nullable=False, server_default=text(f"'{DEFAULT}'")),
    # SHA-256 of the whole key; the key itself is kept nowhere.
    Column("hash", LargeBinary, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    # Requests that may begin in a minute, and run at once; null: any number.
    Column("per_minute", Integer),
    Column("at_once", Integer),
    Column("created_at", When, nullable=False, server_default=text("now()")),
    Column("revoked_at", When),
    # Tokens of the calls that ended in a minute; null: any number.
    Column("tokens_per_minute", Integer),
    CheckConstraint("per_minute > 0 AND at_once > 0", name="limits_let_some_in"),
    CheckConstraint("tokens_per_minute > 0", name="tokens_let_some_in"),
    Index("uq_api_keys_name", "name", unique=True, postgresql_where=text(NOT_REVOKED)),
)
