"""Define the trainer's tables: policy versions, updates that made them, what they consumed."""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
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

from store.records import POLICY_STATES, UPDATE_STATES
from store.schema.base import When, metadata, one_of

# The condition for a version that is loaded, or that will be: of all that there ever were few are.
LIVE = "state IN ('written', 'ready', 'serving', 'published')"

policies = Table(
    "policies",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("state", Text, nullable=False),
    Column("served_name", Text, nullable=False),
    Column("adapter_path", Text),
    Column("update_id", Uuid, ForeignKey("updates.id"), unique=True),
    Column("created_at", When, nullable=False, server_default=text("now()")),
    Column("changed_at", When, nullable=False, server_default=text("now()")),
    # The files are gone, as nothing could ask for them any more; null while they are there.
    Column("files_deleted_at", When),
    one_of("state", POLICY_STATES),
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

# Episodes of a policy with a call in such a time are set aside (`store.updates.faults`).
fault_times = Table(
    "fault_times",
    metadata,
    Column("policy", Text, primary_key=True),
    # Those that had a call since then and began before this UUIDv7 was made.
    Column("called_since", When, primary_key=True),
    Column("began_before", Uuid, nullable=False),
)

consumptions = Table(
    "consumptions",
    metadata,
    Column("episode_id", Uuid, primary_key=True),
    Column("policy", Text, primary_key=True),
    Column("update_id", Uuid, ForeignKey("updates.id"), nullable=False),
    Column("trained", Boolean, nullable=False),
    Column("reason", Text),
    Column("at", When, nullable=False, server_default=text("now()")),
    ForeignKeyConstraint(
        ["episode_id", "policy"], ["episode_policies.episode_id", "episode_policies.policy"]
    ),
    CheckConstraint("trained OR reason IS NOT NULL", name="reason_given"),
    Index("ix_consumptions_update_id", "update_id"),
)
