"""Index what is scored in the order of claims, so that groups of one are found without sorting."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

MINUTE = "date_bin('00:01:00'::interval, scored_at, '1970-01-01 00:00:00+00'::timestamptz)"


def upgrade() -> None:
    """Add the index."""
    op.create_index(
        "ix_episode_policies_latest",
        "episode_policies",
        ["policy", sa.text(f"{MINUTE} DESC"), sa.text("version DESC"), "scored_at", "episode_id"],
        postgresql_where=sa.text("scored_at IS NOT NULL AND claimed_by IS NULL AND claimable"),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_episode_policies_latest", "episode_policies")
