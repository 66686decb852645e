"""Keep which API key a call and a request to `/feedback` came with, for a key that goes bad."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

TABLES = ("transitions", "feedback_requests")


def upgrade() -> None:
    """Add the columns; of what was stored before, no key is known."""
    for table in TABLES:
        op.add_column(table, sa.Column("api_key", sa.Text()))


def downgrade() -> None:
    """Forget the keys."""
    for table in TABLES:
        op.drop_column(table, "api_key")
