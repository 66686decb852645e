"""Keep the API key of each episode's first call, by which claims are capped."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

TABLES = ("episodes", "episode_policies")
FILL = """
    UPDATE episodes e SET api_key = t.api_key
    FROM transitions t
    WHERE t.id = e.first_call_id AND t.api_key IS NOT NULL AND e.deleted_at IS NULL
"""
COPY = """
    UPDATE episode_policies p SET api_key = e.api_key
    FROM episodes e WHERE e.id = p.episode_id AND e.api_key IS NOT NULL
"""


def upgrade() -> None:
    """Add the columns, and fill them where the calls have a key."""
    for table in TABLES:
        op.add_column(table, sa.Column("api_key", sa.Text()))
    op.execute(FILL)
    op.execute(COPY)


def downgrade() -> None:
    """Drop the columns; the calls have the keys."""
    for table in TABLES:
        op.drop_column(table, "api_key")
