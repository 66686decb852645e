"""Create the ledger: calls, episodes, tool events, feedback, policies, updates and keys.

Until a version is released, this revision is edited together with `store.schema`, and no other is
added.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
NOW = sa.text("now()")
# Columns that the server does not compress: pglz takes longer than all other work on a call.
BULK = (
    *("request", "request_raw", "reply", "reply_raw"),
    *("prompt_ids", "sampled_ids", "sampled_logprobs", "policy_logprobs"),
)


def upgrade() -> None:
    """Create all tables, and the trigger that keeps policy events unchanged."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default=sa.text("'default'"), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("per_minute", sa.Integer()),
        sa.Column("at_once", sa.Integer()),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.Column("revoked_at", TIME),
        sa.Column("tokens_per_minute", sa.Integer()),
        sa.CheckConstraint(
            "per_minute > 0 AND at_once > 0", name=op.f("ck_api_keys_limits_let_some_in")
        ),
        sa.CheckConstraint("tokens_per_minute > 0", name=op.f("ck_api_keys_tokens_let_some_in")),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_index(
        "uq_api_keys_name",
        "api_keys",
        ["name"],
        unique=True,
        postgresql_where=sa.text("revoked_at IS NULL"),
    )
    op.create_table(
        "common_fingerprints",
        sa.Column("digest", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_common_fingerprints"),
    )
    op.create_table(
        "deleted_names",
        sa.Column("digest", sa.Uuid(), nullable=False),
        sa.Column("deletion", sa.BigInteger(), nullable=False),
        sa.Column("at", TIME, server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_deleted_names"),
    )
    op.create_index("ix_deleted_names_deletion", "deleted_names", ["deletion"])
    op.create_table(
        "dropped_days",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column("at", TIME, server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("day", name="pk_dropped_days"),
    )
    op.create_table(
        "episodes",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("task", sa.Text()),
        sa.Column("task_named", sa.Boolean(), nullable=False),
        sa.Column("task_from", sa.Uuid()),
        sa.Column("policy", sa.Text()),
        sa.Column("policy_version", sa.Integer()),
        sa.Column("first_call_id", sa.Uuid(), nullable=False),
        sa.Column("last_call_id", sa.Uuid(), nullable=False),
        sa.Column("last_call_at", TIME, nullable=False),
        sa.Column("failed", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("scored_at", TIME),
        sa.Column("call_scored_at", TIME),
        sa.Column("reward", sa.Double()),
        sa.Column("doubtful", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("linked", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("root", sa.Uuid()),
        sa.Column("joined_task", sa.Text()),
        sa.Column("split", sa.Text(), server_default=sa.text("'train'"), nullable=False),
        sa.Column("joined_split", sa.Text()),
        sa.Column("quarantined_reason", sa.Text()),
        sa.Column("deleted_at", TIME),
        sa.CheckConstraint(
            "joined_split IN ('train', 'eval')", name=op.f("ck_episodes_joined_split_known")
        ),
        sa.CheckConstraint("split IN ('train', 'eval')", name=op.f("ck_episodes_split_known")),
        sa.PrimaryKeyConstraint("id", name="pk_episodes"),
        sa.UniqueConstraint("key", name="uq_episodes_key"),
    )
    op.create_index(
        "ix_episodes_eval",
        "episodes",
        ["policy", "policy_version"],
        postgresql_where=sa.text("COALESCE(joined_split, split) = 'eval'"),
    )
    op.create_index(
        "ix_episodes_first_call_id",
        "episodes",
        ["first_call_id"],
        postgresql_where=sa.text("first_call_id <> id"),
    )
    op.create_index(
        "ix_episodes_last_call_at", "episodes", ["last_call_at"], postgresql_using="brin"
    )
    op.create_index(
        "ix_episodes_root", "episodes", ["root"], postgresql_where=sa.text("root IS NOT NULL")
    )
    op.create_index(
        "ix_episodes_there", "episodes", ["id"], postgresql_where=sa.text("deleted_at IS NULL")
    )
    op.create_table(
        "fault_times",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("called_since", TIME, nullable=False),
        sa.Column("began_before", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "called_since", name="pk_fault_times"),
    )
    op.create_table(
        "feedback_requests",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("body_hash", sa.Text()),
        sa.Column("at", TIME, nullable=False),
        sa.Column("api_key", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_feedback_requests"),
        sa.UniqueConstraint(
            "idempotency_key", "body_hash", name="uq_feedback_requests_idempotency_key_body_hash"
        ),
    )
    op.create_table(
        "recording_outages",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("called_since", TIME, nullable=False),
        sa.Column("began_before", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_recording_outages"),
    )
    op.create_index("ix_recording_outages_began_before", "recording_outages", ["began_before"])
    op.create_table(
        "links",
        sa.Column("call_id", sa.Uuid(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("provided_by", sa.Uuid(), nullable=False),
        sa.Column("needed_by", sa.Uuid(), nullable=False),
        sa.Column("too_common", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("call_id", "level", "provided_by", name="pk_links"),
    )
    op.create_index("ix_links_needed_by", "links", ["needed_by"])
    op.create_index("ix_links_provided_by", "links", ["provided_by"])
    op.create_table(
        "needed_fingerprints",
        sa.Column("digest", sa.Uuid(), nullable=False),
        sa.Column("call_id", sa.Uuid(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
    )
    op.create_index("ix_needed_fingerprints_call_id", "needed_fingerprints", ["call_id"])
    op.create_index("ix_needed_fingerprints_digest", "needed_fingerprints", ["digest"])
    op.create_index(
        "ix_needed_fingerprints_episode_id",
        "needed_fingerprints",
        ["episode_id"],
        postgresql_using="brin",
    )
    op.create_table(
        "outdated_days",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_outdated_days"),
    )
    op.create_table(
        "provided_fingerprints",
        sa.Column("digest", sa.Uuid(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=False),
    )
    op.create_index("ix_provided_fingerprints_digest", "provided_fingerprints", ["digest"])
    op.create_index(
        "ix_provided_fingerprints_episode_id",
        "provided_fingerprints",
        ["episode_id"],
        postgresql_using="brin",
    )
    op.create_table(
        "reward_terms",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("low", sa.Double(), nullable=False),
        sa.Column("high", sa.Double(), nullable=False),
        sa.Column("fallback", sa.Double()),
        sa.Column("texts", postgresql.JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "metric", name="pk_reward_terms"),
    )
    op.create_table(
        "transitions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("confidence", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text()),
        sa.Column("policy_version", sa.Integer()),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("http_status", sa.Integer()),
        sa.Column("reply", sa.LargeBinary()),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("dialect", sa.Text(), nullable=False),
        sa.Column("served_model", sa.Text()),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("request_raw", sa.LargeBinary()),
        sa.Column("reply_raw", sa.LargeBinary()),
        sa.Column("response_id", sa.Text()),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("tool_calls", sa.JSON(), nullable=False),
        sa.Column("usage", sa.JSON()),
        sa.Column("finish", sa.Text()),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("first_chunk_ms", sa.Double()),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Column("retry", sa.Integer(), nullable=False),
        sa.Column("retry_of", sa.Uuid()),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("arm", sa.Text()),
        sa.Column("api_key", sa.Text()),
        sa.Column("text_digest", sa.Uuid()),
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("parent_id", sa.Uuid()),
        sa.Column("request_prefix", sa.Integer()),
        sa.Column("request_suffix", sa.Integer()),
        sa.Column("prompt_prefix", sa.Integer()),
        sa.Column("request", sa.LargeBinary()),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("policy_logprobs", sa.LargeBinary()),
        sa.CheckConstraint(
            "arm IN ('serving', 'canary', 'control')", name=op.f("ck_transitions_arm_known")
        ),
        sa.CheckConstraint(
            "confidence IN ('certain', 'likely', 'doubtful')",
            name=op.f("ck_transitions_confidence_known"),
        ),
        sa.CheckConstraint("split IN ('train', 'eval')", name=op.f("ck_transitions_split_known")),
        sa.CheckConstraint(
            "status IN ('complete', 'client_gone', 'upstream_error', 'truncated')",
            name=op.f("ck_transitions_status_known"),
        ),
        sa.CheckConstraint(
            "trainable OR reason IS NOT NULL", name=op.f("ck_transitions_reason_given")
        ),
        sa.PrimaryKeyConstraint("id", name="pk_transitions"),
        postgresql_partition_by="RANGE (id)",
    )
    op.create_index(
        "ix_transitions_called",
        "transitions",
        ["policy", "policy_version", "id"],
        postgresql_where=sa.text("policy_version > 0"),
    )
    op.create_index("ix_transitions_episode_id", "transitions", ["episode_id"])
    op.create_index("ix_transitions_response_id", "transitions", ["response_id"])
    op.create_index(
        "ix_transitions_without_logprobs",
        "transitions",
        ["policy", "policy_version"],
        postgresql_where=sa.text("trainable AND octet_length(sampled_logprobs) = 0"),
    )
    op.create_table(
        "updates",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer()),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("recipe", postgresql.JSONB(), nullable=False),
        sa.Column(
            "metrics", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False
        ),
        sa.Column("group_size", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("oldest_version", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("trust", postgresql.JSONB()),
        sa.Column("baselines", postgresql.JSONB()),
        sa.Column("claimed_at", TIME, server_default=NOW, nullable=False),
        sa.Column("finished_at", TIME),
        sa.CheckConstraint(
            "state IN ('running', 'done', 'abandoned', 'expired')",
            name=op.f("ck_updates_state_known"),
        ),
        sa.PrimaryKeyConstraint("id", name="pk_updates"),
        sa.UniqueConstraint("policy", "version", name="uq_updates_policy_version"),
    )
    op.create_index("ix_updates_policy_claimed_at", "updates", ["policy", "claimed_at"])
    op.create_index(
        "uq_updates_running",
        "updates",
        ["policy"],
        unique=True,
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_table(
        "episode_policies",
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("own_version", sa.Integer()),
        sa.Column("own_latest", sa.Integer()),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("latest", sa.Integer(), nullable=False),
        sa.Column("claimed_by", sa.Uuid()),
        sa.Column("task", sa.Text()),
        sa.Column("scored_at", TIME),
        sa.Column("call_scored_at", TIME),
        sa.Column("reward", sa.Double()),
        sa.Column("lacks", sa.Text()),
        sa.Column("failed", sa.Boolean(), nullable=False),
        sa.Column("last_call_at", TIME, nullable=False),
        sa.Column("claimable", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["claimed_by"], ["updates.id"], name="fk_episode_policies_claimed_by"
        ),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name="fk_episode_policies_episode_id"
        ),
        sa.PrimaryKeyConstraint("episode_id", "policy", name="pk_episode_policies"),
    )
    op.create_index(
        "ix_episode_policies_call_scored",
        "episode_policies",
        ["policy", "task", "version"],
        postgresql_where=sa.text(
            "call_scored_at IS NOT NULL AND scored_at IS NULL AND claimed_by IS NULL AND claimable"
        ),
    )
    op.create_index(
        "ix_episode_policies_claimed_by",
        "episode_policies",
        ["claimed_by"],
        postgresql_where=sa.text("claimed_by IS NOT NULL"),
    )
    op.create_index(
        "ix_episode_policies_failed",
        "episode_policies",
        ["policy", "task"],
        postgresql_where=sa.text(
            "failed AND scored_at IS NULL AND claimed_by IS NULL AND claimable"
        ),
    )
    op.create_index(
        "ix_episode_policies_lacking",
        "episode_policies",
        ["policy", "lacks"],
        postgresql_where=sa.text("lacks IS NOT NULL AND claimed_by IS NULL AND claimable"),
    )
    op.create_index(
        "ix_episode_policies_ready",
        "episode_policies",
        ["policy", "task", "version", "scored_at"],
        postgresql_include=["reward", "episode_id"],
        postgresql_where=sa.text("scored_at IS NOT NULL AND claimed_by IS NULL AND claimable"),
    )
    op.create_index(
        "ix_episode_policies_waiting",
        "episode_policies",
        ["policy", "version", "episode_id"],
        postgresql_where=sa.text("claimed_by IS NULL AND claimable"),
    )
    op.create_table(
        "feedback",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("value", sa.Double()),
        sa.Column("label", sa.Text()),
        sa.Column("correction", sa.Text()),
        sa.Column("target_kind", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("episode_id", sa.Uuid()),
        sa.Column("call_id", sa.Uuid()),
        sa.Column("source", sa.Text()),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.CheckConstraint(
            "target_kind IN ('episode', 'call', 'response')",
            name=op.f("ck_feedback_target_kind_known"),
        ),
        sa.CheckConstraint("value IS NULL OR label IS NULL", name=op.f("ck_feedback_one_value")),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name="fk_feedback_episode_id"),
        sa.ForeignKeyConstraint(
            ["request_id"], ["feedback_requests.id"], name="fk_feedback_request_id"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_feedback"),
    )
    op.create_index("ix_feedback_episode_id", "feedback", ["episode_id"])
    op.create_index(
        "ix_feedback_pending",
        "feedback",
        ["target_kind", "target"],
        postgresql_where=sa.text("episode_id IS NULL"),
    )
    op.create_index("ix_feedback_request_id", "feedback", ["request_id"])
    op.create_index(
        "ix_feedback_source",
        "feedback",
        ["source", "target_kind", "id"],
        postgresql_where=sa.text("source IS NOT NULL"),
    )
    op.create_table(
        "freed_consumptions",
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("update_id", sa.Uuid(), nullable=False),
        sa.Column("trained", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["update_id"], ["updates.id"], name="fk_freed_consumptions_update_id"
        ),
        sa.PrimaryKeyConstraint("episode_id", "policy", "update_id", name="pk_freed_consumptions"),
    )
    op.create_table(
        "judgements",
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("judge", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_call_at", TIME, nullable=False),
        sa.Column("due_at", TIME),
        sa.Column("at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "outcome IN ('judged', 'cannot_tell', 'failed')",
            name=op.f("ck_judgements_outcome_known"),
        ),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name="fk_judgements_episode_id"),
        sa.PrimaryKeyConstraint("episode_id", "judge", name="pk_judgements"),
    )
    op.create_table(
        "policies",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default=sa.text("'default'"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("served_name", sa.Text(), nullable=False),
        sa.Column("adapter_path", sa.Text()),
        sa.Column("update_id", sa.Uuid()),
        sa.Column("created_at", TIME, server_default=NOW, nullable=False),
        sa.Column("changed_at", TIME, server_default=NOW, nullable=False),
        sa.Column("files_deleted_at", TIME),
        sa.Column("share", sa.Double()),
        sa.Column("gate", postgresql.JSONB()),
        sa.Column("unloaded_at", TIME),
        sa.Column("ended_at", TIME),
        sa.Column("frozen_at", TIME),
        sa.CheckConstraint(
            "share IS NULL OR state IN ('canary', 'retired')",
            name=op.f("ck_policies_share_is_of_an_arm"),
        ),
        sa.CheckConstraint(
            "unloaded_at IS NULL OR state IN ('retired', 'rolled_back') AND share IS NULL AND version > 0",
            name=op.f("ck_policies_unloaded_serves_nobody"),
        ),
        sa.CheckConstraint(
            "ended_at IS NULL OR state IN ('retired', 'rolled_back', 'rejected')",
            name=op.f("ck_policies_ended_for_good"),
        ),
        sa.CheckConstraint(
            "files_deleted_at IS NULL OR state = 'rejected' OR unloaded_at IS NOT NULL",
            name=op.f("ck_policies_deleted_is_not_servable"),
        ),
        sa.CheckConstraint(
            "state IN ('written', 'loaded', 'canary', 'serving', 'retired', 'rejected', 'rolled_back')",
            name=op.f("ck_policies_state_known"),
        ),
        sa.CheckConstraint(
            "(version = 0) = (update_id IS NULL)", name=op.f("ck_policies_base_or_trained")
        ),
        sa.CheckConstraint("share >= 0 AND share <= 1", name=op.f("ck_policies_share_is_a_share")),
        sa.ForeignKeyConstraint(["update_id"], ["updates.id"], name="fk_policies_update_id"),
        sa.PrimaryKeyConstraint("name", "version", name="pk_policies"),
        sa.UniqueConstraint("update_id", name="uq_policies_update_id"),
    )
    op.create_index(
        "ix_policies_base", "policies", ["served_name"], postgresql_where=sa.text("version = 0")
    )
    op.create_index(
        "ix_policies_live",
        "policies",
        ["name"],
        postgresql_where=sa.text("state <> 'rejected' AND unloaded_at IS NULL"),
    )
    op.create_index(
        "ix_policies_unloaded",
        "policies",
        ["name", "changed_at"],
        postgresql_where=sa.text("unloaded_at IS NOT NULL"),
    )
    op.create_index(
        "ix_policies_rolled_back",
        "policies",
        ["name", "version"],
        postgresql_where=sa.text("state = 'rolled_back'"),
    )
    op.create_index(
        "ix_policies_with_files",
        "policies",
        ["name", "version"],
        postgresql_where=sa.text("files_deleted_at IS NULL"),
    )
    op.create_index(
        "uq_policies_canary",
        "policies",
        ["name"],
        unique=True,
        postgresql_where=sa.text("state = 'canary'"),
    )
    op.create_index(
        "uq_policies_control",
        "policies",
        ["name"],
        unique=True,
        postgresql_where=sa.text("state = 'retired' AND share IS NOT NULL"),
    )
    op.create_index(
        "uq_policies_served_name",
        "policies",
        ["served_name"],
        unique=True,
        postgresql_where=sa.text("version > 0"),
    )
    op.create_index(
        "uq_policies_serving",
        "policies",
        ["name"],
        unique=True,
        postgresql_where=sa.text("state = 'serving'"),
    )
    op.create_table(
        "tool_events",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("episode_id", sa.Uuid()),
        sa.Column("asked_by", sa.Uuid()),
        sa.Column("target_kind", sa.Text()),
        sa.Column("target", sa.Text()),
        sa.Column("tool_id", sa.Text()),
        sa.Column("name", sa.Text()),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text()),
        sa.Column("ms", sa.Double()),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("quotes", sa.ARRAY(sa.Uuid())),
        sa.Column("at", TIME, nullable=False),
        sa.CheckConstraint(
            "source IN ('header', 'feedback', 'not_offered', 'is_error', 'reader', 'assumed')",
            name=op.f("ck_tool_events_source_known"),
        ),
        sa.CheckConstraint(
            "status IN ('ok', 'error', 'timeout', 'malformed', 'denied')",
            name=op.f("ck_tool_events_status_known"),
        ),
        sa.CheckConstraint(
            "target_kind IN ('episode', 'call', 'response')",
            name=op.f("ck_tool_events_target_kind_known"),
        ),
        sa.ForeignKeyConstraint(["episode_id"], ["episodes.id"], name="fk_tool_events_episode_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tool_events"),
    )
    op.create_index("ix_tool_events_episode_id", "tool_events", ["episode_id"])
    op.create_index(
        "ix_tool_events_pending",
        "tool_events",
        ["target_kind", "target"],
        postgresql_where=sa.text("episode_id IS NULL"),
    )
    op.create_table(
        "consumptions",
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("update_id", sa.Uuid(), nullable=False),
        sa.Column("trained", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "trained OR reason IS NOT NULL", name=op.f("ck_consumptions_reason_given")
        ),
        sa.ForeignKeyConstraint(
            ["episode_id", "policy"],
            ["episode_policies.episode_id", "episode_policies.policy"],
            name="fk_consumptions_episode_id",
        ),
        sa.ForeignKeyConstraint(["update_id"], ["updates.id"], name="fk_consumptions_update_id"),
        sa.PrimaryKeyConstraint("episode_id", "policy", name="pk_consumptions"),
    )
    op.create_index("ix_consumptions_update_id", "consumptions", ["update_id"])
    op.create_table(
        "policy_events",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("from_state", sa.Text()),
        sa.Column("to_state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("evidence", postgresql.JSONB()),
        sa.Column("at", TIME, server_default=NOW, nullable=False),
        sa.CheckConstraint(
            "actor IN ('trainer', 'controller', 'operator', 'import')",
            name=op.f("ck_policy_events_actor_known"),
        ),
        sa.CheckConstraint(
            "from_state IN ('written', 'loaded', 'canary', 'serving', 'retired', 'rejected', 'rolled_back')",
            name=op.f("ck_policy_events_from_state_known"),
        ),
        sa.CheckConstraint(
            "to_state IN ('written', 'loaded', 'canary', 'serving', 'retired', 'rejected', 'rolled_back')",
            name=op.f("ck_policy_events_to_state_known"),
        ),
        sa.ForeignKeyConstraint(
            ["name", "version"], ["policies.name", "policies.version"], name="fk_policy_events_name"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_policy_events"),
    )
    op.create_index("ix_policy_events_version", "policy_events", ["name", "version", "id"])
    for column in BULK:
        op.execute(f"ALTER TABLE transitions ALTER {column} SET STORAGE EXTERNAL")
    op.execute(
        """
        CREATE FUNCTION refuse_change_of_event() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'policy_events are only added: the event % stays as it is', OLD.id
                USING ERRCODE = 'restrict_violation',
                    HINT = 'Say what has changed since by another event: pawl policies --help.';
        END
        $$
        """
    )
    op.execute(
        """
        CREATE TRIGGER policy_events_stay BEFORE UPDATE OR DELETE ON policy_events
        FOR EACH ROW EXECUTE FUNCTION refuse_change_of_event()
        """
    )


def downgrade() -> None:
    """Drop all tables, with everything in them."""
    for table in (
        "policy_events",
        "consumptions",
        "tool_events",
        "policies",
        "judgements",
        "freed_consumptions",
        "feedback",
        "episode_policies",
        "updates",
        "transitions",
        "reward_terms",
        "provided_fingerprints",
        "outdated_days",
        "needed_fingerprints",
        "links",
        "recording_outages",
        "feedback_requests",
        "fault_times",
        "episodes",
        "dropped_days",
        "deleted_names",
        "common_fingerprints",
        "api_keys",
    ):
        op.drop_table(table)
    op.execute("DROP FUNCTION refuse_change_of_event()")
