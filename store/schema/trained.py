"""Define the trainer's tables: policy versions, updates that made them, what they consumed."""

from typing import Final

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from store.records import UPDATE_STATES
from store.schema.base import When, metadata, one_of
from store.tenants import DEFAULT
from store.versions import ACTORS, POLICY_STATES

# Among the figures of an update that made a version: the SHA-256 of the version's manifest.
MANIFEST_SHA256: Final = "manifest_sha256"
# Among the figures of an update that trained: how far its version is from the base model, as KL in
# nats a token.
KL_TO_BASE: Final = "kl_to_base"
# In the evidence of a rejection: the bound that this was held against.
MOST_KL_TO_BASE: Final = "most_kl_to_base"
# How far what is served of a version may be from what was trained: a key of its update's recipe.
PROBE_TOLERANCE: Final = "probe_tolerance"
# The condition for a version that is loaded, or that will be: of all that there ever were few are.
LIVE = "state IN ('written', 'ready', 'candidate', 'canary', 'serving', 'published', 'rolled_back')"
# The condition for a published version that had the traffic: a canary which made way for another
# before it got that is published too, for its episodes, and keeps its share, which serving ends.
ONCE_SERVED = "state = 'published' AND (version = 0 OR share IS NULL)"
# The condition for a version (`p`) that was retired, and is published again to serve. By the clock
# of the database: ids are made by those of several machines.
CALLED_BACK = """p.state = 'published' AND 'retired' IS NOT DISTINCT FROM (
    SELECT v.from_state FROM policy_events v WHERE v.name = p.name AND v.version = p.version
    ORDER BY v.at DESC, v.id DESC LIMIT 1)"""

# One row for each version of a policy; version 0 is the base model.
policies = Table(
    "policies",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    # Whose the policy is, which never changes.
    Column("tenant", Text, nullable=False, server_default=text(f"'{DEFAULT}'")),
    Column("state", Text, nullable=False),
    # The model name on the upstream: `NAME@N`, or the name of the base model.
    Column("served_name", Text, nullable=False),
    # The folder of the adapter and the update that made it; null for version 0.
    Column("adapter_path", Text),
    Column("update_id", Uuid, ForeignKey("updates.id"), unique=True),
    Column("created_at", When, nullable=False, server_default=text("now()")),
    Column("changed_at", When, nullable=False, server_default=text("now()")),
    # The files are gone, as nothing could ask for them any more; null while they are there.
    Column("files_deleted_at", When),
    # Of a canary, its share of new episodes, also after it was rolled back. Of version 0, the share
    # that stays on the base model.
    Column("share", Double),
    # The rule by which a candidate is judged, as its recipe had it.
    Column("gate", JSONB),
    # It was rolled back, which stays so: nothing is trained from it, or on its episodes.
    Column("rolled_back_at", When),
    # The policy's line started again before it (`store.retraining`): it never serves again, nothing
    # is trained from it, and it makes no episode older.
    Column("ended_at", When),
    # Of version 0: nothing but an operator changes which of the policy's versions has traffic.
    Column("frozen_at", When),
    one_of("state", POLICY_STATES),
    CheckConstraint("share >= 0 AND share <= 1", name="share_is_a_share"),
    CheckConstraint(
        "CASE WHEN rolled_back_at IS NULL THEN state <> 'rolled_back'"
        " ELSE state IN ('rolled_back', 'retired') END",
        name="rolled_back_for_good",
    ),
    CheckConstraint(
        "ended_at IS NULL OR state IN ('published', 'rolled_back', 'retired', 'rejected')",
        name="ended_for_good",
    ),
    CheckConstraint(
        "files_deleted_at IS NULL OR state IN ('retired', 'rejected')",
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
    # Few of all versions, and most policies have none.
    Index(
        "ix_policies_rolled_back",
        "name",
        "version",
        postgresql_where=text("rolled_back_at IS NOT NULL"),
    ),
    # So that what is asked once a second does not grow with the number of versions.
    Index("ix_policies_base", "served_name", postgresql_where=text("version = 0")),
    Index("ix_policies_live", "name", postgresql_where=text(LIVE)),
    Index("ix_policies_retired", "name", "changed_at", postgresql_where=text("state = 'retired'")),
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
    # its episodes are free again; one that has a version was of a line that a retraining ended.
    Column("state", Text, nullable=False),
    # The whole recipe, so that an update can be repeated.
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

# Episodes of a policy with a call in such a time are set aside (`store.ready`).
fault_times = Table(
    "fault_times",
    metadata,
    Column("policy", Text, primary_key=True),
    # Those that had a call since then and began before this UUIDv7 was made.
    Column("called_since", When, primary_key=True),
    Column("began_before", Uuid, nullable=False),
)

# Episodes that an update has spent, whether it trained on them or not: once for each policy.
consumptions = Table(
    "consumptions",
    metadata,
    Column("episode_id", Uuid, primary_key=True),
    Column("policy", Text, primary_key=True),
    Column("update_id", Uuid, ForeignKey("updates.id"), nullable=False),
    Column("trained", Boolean, nullable=False),
    # Why it was not trained, such as `stale`, `aged`, `alone`, `too_long`, `rolled_back` or
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
