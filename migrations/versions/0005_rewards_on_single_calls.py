"""Let episodes be claimed that have rewards on single calls only."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

FREE = "claimed_by IS NULL AND root IS NULL AND quarantined_reason IS NULL"
# Fills the new column with the values that `store.link.settle` computes from now on.
SCORED = """
    UPDATE episodes e SET call_scored_at = s.at
    FROM (SELECT COALESCE(p.root, p.id) AS whole, max(f.at) AS at
          FROM feedback f JOIN episodes p ON p.id = f.episode_id
          WHERE f.metric = 'reward' AND f.call_id IS NOT NULL AND p.method <> 'own'
          GROUP BY 1) s
    WHERE e.id = s.whole
"""


def upgrade() -> None:
    """Add the time of each episode's newest reward for a single call, with an index."""
    op.add_column("episodes", sa.Column("call_scored_at", sa.DateTime(timezone=True)))
    op.execute(SCORED)
    op.create_index(
        "ix_episodes_call_scored",
        "episodes",
        [
            "policy",
            sa.text("COALESCE(joined_task, task)"),
            sa.text("COALESCE(policy_version, 0)"),
        ],
        postgresql_where=sa.text(f"call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE}"),
    )


def downgrade() -> None:
    """Drop the column and its index; the rewards themselves stay."""
    op.drop_index("ix_episodes_call_scored", "episodes")
    op.drop_column("episodes", "call_scored_at")
