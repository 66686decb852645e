"""Create the ledger: calls, episodes, tool events, feedback, policies, updates and keys."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
        sa.UniqueConstraint("name", name=op.f("uq_api_keys_name")),
    )
    op.create_table(
        "feedback_requests",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("body_hash", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feedback_requests")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_feedback_requests_idempotency_key")),
    )
    op.create_table(
        "updates",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("recipe", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "metrics",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'::jsonb"),
            nullable=False,
        ),
        sa.Column(
            "claimed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('running', 'done', 'abandoned')", name=op.f("ck_updates_state_known")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_updates")),
        sa.UniqueConstraint("policy", "version", name=op.f("uq_updates_policy_version")),
    )
    op.create_index(
        "uq_updates_running",
        "updates",
        ["policy"],
        unique=True,
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_table(
        "episodes",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("task_named", sa.Boolean(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=True),
        sa.Column("policy_version", sa.Integer(), nullable=True),
        sa.Column("first_call_id", sa.Uuid(), nullable=False),
        sa.Column("last_call_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("scored_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("claimed_by", sa.Uuid(), nullable=True),
        sa.ForeignKeyConstraint(
            ["claimed_by"], ["updates.id"], name=op.f("fk_episodes_claimed_by")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_episodes")),
        sa.UniqueConstraint("key", name=op.f("uq_episodes_key")),
    )
    op.create_index("ix_episodes_claimed_by", "episodes", ["claimed_by"], unique=False)
    op.create_index("ix_episodes_last_call_at", "episodes", ["last_call_at"], unique=False)
    op.create_index(
        "ix_episodes_ready",
        "episodes",
        ["policy", "task", "scored_at"],
        unique=False,
        postgresql_where=sa.text("scored_at IS NOT NULL AND claimed_by IS NULL"),
    )
    op.create_table(
        "policies",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("served_name", sa.Text(), nullable=False),
        sa.Column("adapter_path", sa.Text(), nullable=True),
        sa.Column("update_id", sa.Uuid(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column(
            "changed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint(
            "state IN ('written', 'published', 'serving', 'retired', 'rejected')",
            name=op.f("ck_policies_state_known"),
        ),
        sa.CheckConstraint(
            "(version = 0) = (update_id IS NULL)", name=op.f("ck_policies_base_or_trained")
        ),
        sa.ForeignKeyConstraint(["update_id"], ["updates.id"], name=op.f("fk_policies_update_id")),
        sa.PrimaryKeyConstraint("name", "version", name=op.f("pk_policies")),
        sa.UniqueConstraint("served_name", name=op.f("uq_policies_served_name")),
        sa.UniqueConstraint("update_id", name=op.f("uq_policies_update_id")),
    )
    op.create_index(
        "uq_policies_serving",
        "policies",
        ["name"],
        unique=True,
        postgresql_where=sa.text("state = 'serving'"),
    )
    op.create_table(
        "consumptions",
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("update_id", sa.Uuid(), nullable=False),
        sa.Column("trained", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.CheckConstraint(
            "trained OR reason IS NOT NULL", name=op.f("ck_consumptions_reason_given")
        ),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name=op.f("fk_consumptions_episode_id")
        ),
        sa.ForeignKeyConstraint(
            ["update_id"], ["updates.id"], name=op.f("fk_consumptions_update_id")
        ),
        sa.PrimaryKeyConstraint("episode_id", name=op.f("pk_consumptions")),
    )
    op.create_index("ix_consumptions_update_id", "consumptions", ["update_id"], unique=False)
    op.create_table(
        "feedback",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("target_kind", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=True),
        sa.Column("call_id", sa.Uuid(), nullable=True),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "target_kind IN ('episode', 'call', 'response')",
            name=op.f("ck_feedback_target_kind_known"),
        ),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name=op.f("fk_feedback_episode_id")
        ),
        sa.ForeignKeyConstraint(
            ["request_id"], ["feedback_requests.id"], name=op.f("fk_feedback_request_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feedback")),
    )
    op.create_index("ix_feedback_episode_id", "feedback", ["episode_id"], unique=False)
    op.create_index(
        "ix_feedback_pending",
        "feedback",
        ["target_kind", "target"],
        unique=False,
        postgresql_where=sa.text("episode_id IS NULL"),
    )
    op.create_table(
        "tool_events",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=True),
        sa.Column("asked_by", sa.Uuid(), nullable=True),
        sa.Column("target_kind", sa.Text(), nullable=True),
        sa.Column("target", sa.Text(), nullable=True),
        sa.Column("tool_id", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("ms", sa.Double(), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "source IN ('header', 'feedback')", name=op.f("ck_tool_events_source_known")
        ),
        sa.CheckConstraint(
            "status IN ('ok', 'error', 'timeout', 'malformed', 'denied')",
            name=op.f("ck_tool_events_status_known"),
        ),
        sa.CheckConstraint(
            "target_kind IN ('episode', 'call', 'response')",
            name=op.f("ck_tool_events_target_kind_known"),
        ),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name=op.f("fk_tool_events_episode_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tool_events")),
    )
    op.create_index("ix_tool_events_episode_id", "tool_events", ["episode_id"], unique=False)
    op.create_index(
        "ix_tool_events_pending",
        "tool_events",
        ["target_kind", "target"],
        unique=False,
        postgresql_where=sa.text("episode_id IS NULL"),
    )
    op.create_table(
        "transitions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("dialect", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=True),
        sa.Column("policy_version", sa.Integer(), nullable=True),
        sa.Column("served_model", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("request", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("request_raw", sa.LargeBinary(), nullable=True),
        sa.Column("reply", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reply_raw", sa.LargeBinary(), nullable=True),
        sa.Column("response_id", sa.Text(), nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("tool_calls", sa.JSON(), nullable=False),
        sa.Column("usage", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("finish", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("first_chunk_ms", sa.Double(), nullable=True),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Column("retry", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "status IN ('complete', 'client_gone', 'upstream_error', 'truncated')",
            name=op.f("ck_transitions_status_known"),
        ),
        sa.CheckConstraint(
            "trainable OR reason IS NOT NULL", name=op.f("ck_transitions_reason_given")
        ),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name=op.f("fk_transitions_episode_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transitions")),
        postgresql_partition_by="RANGE (id)",
    )
    op.create_index("ix_transitions_episode_id", "transitions", ["episode_id"], unique=False)
    op.create_index("ix_transitions_response_id", "transitions", ["response_id"], unique=False)


def downgrade() -> None:
    """Drop all tables, with everything in them."""
    op.drop_index("ix_transitions_response_id", table_name="transitions")
    op.drop_index("ix_transitions_episode_id", table_name="transitions")
    op.drop_table("transitions")
    op.drop_index(
        "ix_tool_events_pending",
        table_name="tool_events",
        postgresql_where=sa.text("episode_id IS NULL"),
    )
    op.drop_index("ix_tool_events_episode_id", table_name="tool_events")
    op.drop_table("tool_events")
    op.drop_index(
        "ix_feedback_pending", table_name="feedback", postgresql_where=sa.text("episode_id IS NULL")
    )
    op.drop_index("ix_feedback_episode_id", table_name="feedback")
    op.drop_table("feedback")
    op.drop_index("ix_consumptions_update_id", table_name="consumptions")
    op.drop_table("consumptions")
    op.drop_index(
        "uq_policies_serving", table_name="policies", postgresql_where=sa.text("state = 'serving'")
    )
    op.drop_table("policies")
    op.drop_index(
        "ix_episodes_ready",
        table_name="episodes",
        postgresql_where=sa.text("scored_at IS NOT NULL AND claimed_by IS NULL"),
    )
    op.drop_index("ix_episodes_last_call_at", table_name="episodes")
    op.drop_index("ix_episodes_claimed_by", table_name="episodes")
    op.drop_table("episodes")
    op.drop_index(
        "uq_updates_running", table_name="updates", postgresql_where=sa.text("state = 'running'")
    )
    op.drop_table("updates")
    op.drop_table("feedback_requests")
    op.drop_table("api_keys")
