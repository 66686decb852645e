"""Define the tables of calls, of the episodes that they are in, and of what joins them.

`transitions` is partitioned by day through its UUIDv7 key, so that the primary key is `id` alone.
No foreign key refers to it, so that a day can be dropped. It has no foreign keys itself: the check
would add a third to the cost of storing a row, and only `store.write.ingest` writes there.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    Double,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    Uuid,
    text,
)

from store.records import ARMS, CALL_STATUSES, CONFIDENCES, EVAL, SPLITS, TRAIN, CallRecord
from store.schema.base import When, metadata, one_of
from store.schema.call_columns import call_columns

# The split of a whole episode: `eval` if any call of any of its parts says so.
SPLIT = "COALESCE(joined_split, split)"
# The condition for an episode that policies may claim. Parts of another episode are claimed and
# consumed with it; quarantined ones, evaluation and what is deleted never.
CLAIMABLE = (
    f"root IS NULL AND quarantined_reason IS NULL AND {SPLIT} = '{TRAIN}' AND deleted_at IS NULL"
)
# The condition for a call that can be trained once the version that sampled it has been asked for
# its log-probabilities.
WITHOUT_LOGPROBS = "trainable AND octet_length(sampled_logprobs) = 0"
# The condition for a call that a trained version served, and not its base model.
OF_A_VERSION = "policy_version > 0"

episodes = Table(
    "episodes",
    metadata,
    Column("id", Uuid, primary_key=True),
    # The name that the client gave, with its namespace, or the id of the first call. Names of other
    # tenants than the default one begin with the tenant and U+001F, in `task`, `response_id`,
    # `target` and `idempotency_key` too. Of a deleted episode it is the digest of its name.
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
    # The last call was refused for what it says (`store.records.FAILED`).
    Column("failed", Boolean, nullable=False, server_default=text("false")),
    # The time of its first reward, and of its newest reward for a single call.
    Column("scored_at", When),
    Column("call_scored_at", When),
    # Its newest reward (of equally new ones the lowest); null before the first, or if withdrawn.
    Column("reward", Double),
    # At least one of its calls belongs to it with confidence `doubtful`.
    Column("doubtful", Boolean, nullable=False, server_default=text("false")),
    # The result of `store.link.settle` (docs/decisions/011-joins-in-the-store.md). `root` is the
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
    # Nothing of the episode is left but what consumptions and other episodes' links refer to
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
    # In the order of their first calls, which never changes: what is outdated is looked for here.
    Index("ix_episodes_there", "id", postgresql_where=text("deleted_at IS NULL")),
    # Those of which a later call was stored first: they are few.
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
    # Token ids are little-endian int32; log-probabilities are little-endian float32, in nats. They
    # are empty if the server gave none: then the trainer computes them.
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("sampled_logprobs", LargeBinary, nullable=False),
    one_of("status", CALL_STATUSES),
    one_of("confidence", CONFIDENCES),
    one_of("split", SPLITS),
    one_of("arm", ARMS),
    CheckConstraint("trainable OR reason IS NOT NULL", name="reason_given"),
    Index("ix_transitions_episode_id", "episode_id"),
    Index("ix_transitions_response_id", "response_id"),
    # The newest calls of each trained version: whether anybody uses it.
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

# `provided_fingerprints`: what later calls may repeat of a call, such as the id of a tool call.
# `needed_fingerprints`: what a call repeats of earlier ones, where its proxy could not join it to
# an episode. A fingerprint has 16 bytes and is stored as uuid, the smallest type of that size.
# `links` holds the matches, which are few.
provided_fingerprints = Table(
    "provided_fingerprints",
    metadata,
    Column("digest", Uuid, nullable=False),
    Column("episode_id", Uuid, nullable=False),
    Index("ix_provided_fingerprints_digest", "digest"),
    # BRIN, because it is looked up when an episode is deleted, and every call adds rows.
    Index("ix_provided_fingerprints_episode_id", "episode_id", postgresql_using="brin"),
)

needed_fingerprints = Table(
    "needed_fingerprints",
    metadata,
    Column("digest", Uuid, nullable=False),
    Column("call_id", Uuid, nullable=False),
    Column("episode_id", Uuid, nullable=False),
    # 0 is the surest. Only the matches of a call's lowest level that has any count.
    Column("level", Integer, nullable=False),
    Index("ix_needed_fingerprints_digest", "digest"),
    Index("ix_needed_fingerprints_call_id", "call_id"),
    Index("ix_needed_fingerprints_episode_id", "episode_id", postgresql_using="brin"),
)

# Tombstones: the first 16 bytes of the SHA-256 of the kind and name of what was deleted
# (`store.tombstones`). Nothing is stored again under such a name. `deletion` counts
# deletions, so that whoever remembers stored calls knows when some of them may be gone.
deleted_names = Table(
    "deleted_names",
    metadata,
    Column("digest", Uuid, primary_key=True),
    Column("deletion", BigInteger, nullable=False),
    Column("at", When, nullable=False, server_default=text("now()")),
    Index("ix_deleted_names_deletion", "deletion"),
)

# Days whose partition was dropped: no call of these days is stored any more.
dropped_days = Table(
    "dropped_days",
    metadata,
    Column("day", Date, primary_key=True),
    Column("calls", BigInteger, nullable=False),
    Column("at", When, nullable=False, server_default=text("now()")),
)

# The last day of each tenant of which records were removed: no call of it, or of a day before, is
# stored any more (`store.retaining`).
outdated_days = Table(
    "outdated_days",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("day", Date, nullable=False),
)

# Matches of needed and provided fingerprints; `store.link` computes from them which episodes are
# one.
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

# Times in which a worker lost records without knowing whose, each taken longer at both ends
# (`store.link.lapses`). Episodes with a call since then that began before this UUIDv7 was made are
# set aside.
lapses = Table(
    "lapses",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("called_since", When, nullable=False),
    Column("began_before", Uuid, nullable=False),
    Index("ix_lapses_began_before", "began_before"),
)
