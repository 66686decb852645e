"""Keep digests of what replies say, and of what the tool calls of results were made of."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the digests; calls and events from before have none."""
    op.add_column("transitions", sa.Column("text_digest", sa.Uuid()))
    op.add_column("tool_events", sa.Column("quotes", sa.ARRAY(sa.Uuid())))


def downgrade() -> None:
    """Drop the digests."""
    op.drop_column("tool_events", "quotes")
    op.drop_column("transitions", "text_digest")
