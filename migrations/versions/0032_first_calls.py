"""Index the episodes of which a later call was stored first, by their first calls."""

from alembic import op
from sqlalchemy import text

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the index; it holds few episodes."""
    op.create_index(
        "ix_episodes_first_call_id",
        "episodes",
        ["first_call_id"],
        postgresql_where=text("first_call_id <> id"),
    )


def downgrade() -> None:
    """Drop the index: each look of a gate reads all episodes of its time and later ones."""
    op.drop_index("ix_episodes_first_call_id", table_name="episodes")
