"""Index for the claim query, and record an update's group size, limits and moving baselines."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

FREE = "claimed_by IS NULL AND root IS NULL AND quarantined_reason IS NULL"
TASK = sa.text("COALESCE(joined_task, task)")
VERSION = sa.text("COALESCE(policy_version, 0)")
LAST_CALLS = """
    UPDATE episodes e SET last_call_id = t.id,
        failed = t.status <> 'complete' OR COALESCE(t.http_status, 0) >= 400
    FROM (SELECT DISTINCT ON (episode_id) episode_id, id, status, http_status
          FROM transitions ORDER BY episode_id, id DESC) t
    WHERE t.episode_id = e.id
"""


def upgrade() -> None:
    """Add each episode's last call and failure, indexes by readiness, and columns of updates."""
    op.add_column("episodes", sa.Column("last_call_id", sa.Uuid()))
    op.add_column(
        "episodes",
        sa.Column("failed", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
    op.execute(LAST_CALLS)
    op.execute("UPDATE episodes SET last_call_id = first_call_id WHERE last_call_id IS NULL")
    op.alter_column("episodes", "last_call_id", nullable=False)
    op.drop_index("ix_episodes_ready", "episodes")
    op.create_index(
        "ix_episodes_ready",
        "episodes",
        ["policy", TASK, VERSION, "scored_at"],
        postgresql_where=sa.text(f"scored_at IS NOT NULL AND {FREE}"),
    )
    op.create_index(
        "ix_episodes_waiting",
        "episodes",
        ["policy", VERSION, "id"],
        postgresql_where=sa.text(FREE),
    )
    op.create_index(
        "ix_episodes_failed",
        "episodes",
        ["policy", "linked", TASK],
        postgresql_where=sa.text("failed AND scored_at IS NULL AND claimed_by IS NULL"),
    )

    op.add_column(
        "updates",
        sa.Column("group_size", sa.Integer(), server_default=sa.text("1"), nullable=False),
    )
    op.add_column(
        "updates",
        sa.Column("oldest_version", sa.Integer(), server_default=sa.text("0"), nullable=False),
    )
    op.add_column("updates", sa.Column("baselines", postgresql.JSONB()))
    _set_states("running", "done", "abandoned", "expired")
    op.create_index("ix_updates_policy_claimed_at", "updates", ["policy", "claimed_at"])


def downgrade() -> None:
    """Drop the columns and indexes; updates in state `expired` become `done`."""
    op.drop_index("ix_updates_policy_claimed_at", "updates")
    op.execute("UPDATE updates SET state = 'done' WHERE state = 'expired'")
    _set_states("running", "done", "abandoned")
    op.drop_column("updates", "baselines")
    op.drop_column("updates", "oldest_version")
    op.drop_column("updates", "group_size")
    for index in ("ix_episodes_failed", "ix_episodes_waiting", "ix_episodes_ready"):
        op.drop_index(index, "episodes")
    op.create_index(
        "ix_episodes_ready",
        "episodes",
        ["policy", "task", "scored_at"],
        postgresql_where=sa.text("scored_at IS NOT NULL AND claimed_by IS NULL"),
    )
    op.drop_column("episodes", "failed")
    op.drop_column("episodes", "last_call_id")


def _set_states(*states: str) -> None:
    known = ", ".join(f"'{state}'" for state in states)
    op.drop_constraint(op.f("ck_updates_state_known"), "updates")
    op.create_check_constraint(op.f("ck_updates_state_known"), "updates", f"state IN ({known})")
