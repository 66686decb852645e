"""Allow more sources of tool events, and add a table of judgements."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

KNOWN = "ck_tool_events_source_known"


def upgrade() -> None:
    """Allow the new sources of tool events and create the table `judgements`."""
    op.drop_constraint(op.f(KNOWN), "tool_events")
    op.create_check_constraint(
        op.f(KNOWN),
        "tool_events",
        "source IN ('header', 'feedback', 'is_error', 'reader', 'assumed')",
    )
    op.create_table(
        "judgements",
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("judge", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_call_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.CheckConstraint(
            "outcome IN ('judged', 'cannot_tell', 'failed')",
            name=op.f("ck_judgements_outcome_known"),
        ),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name=op.f("fk_judgements_episode_id")
        ),
        sa.PrimaryKeyConstraint("episode_id", "judge", name=op.f("pk_judgements")),
    )


def downgrade() -> None:
    """Drop the table `judgements` and delete tool events from the new sources."""
    op.drop_table("judgements")
    op.drop_constraint(op.f(KNOWN), "tool_events")
    op.execute("DELETE FROM tool_events WHERE source NOT IN ('header', 'feedback')")
    op.create_check_constraint(op.f(KNOWN), "tool_events", "source IN ('header', 'feedback')")
