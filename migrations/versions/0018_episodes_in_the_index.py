"""Let the index of what is ready say which episode it is: groups of one need not read the table."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

READY = sa.text("scored_at IS NOT NULL AND claimed_by IS NULL AND claimable")


def upgrade() -> None:
    """Add the episode to the index."""
    _index(["reward", "episode_id"])


def downgrade() -> None:
    """Leave it out again."""
    _index(["reward"])


def _index(include: list[str]) -> None:
    op.drop_index("ix_episode_policies_ready", "episode_policies")
    op.create_index(
        "ix_episode_policies_ready",
        "episode_policies",
        ["policy", "task", "version", "scored_at"],
        postgresql_include=include,
        postgresql_where=READY,
    )
