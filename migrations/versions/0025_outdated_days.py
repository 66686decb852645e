"""Note each tenant's outdated days by themselves: its records may be kept for days of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; what `dropped_days` says holds for all tenants, as before."""
    op.create_table(
        "outdated_days",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_outdated_days")),
    )


def downgrade() -> None:
    """Forget the days: a record of one that comes late is stored again."""
    op.drop_table("outdated_days")
