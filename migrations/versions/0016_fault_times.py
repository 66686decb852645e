"""Keep the times of faults: what a policy's servers sampled then is set aside."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; no fault is known."""
    op.create_table(
        "fault_times",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("called_since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("began_before", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "called_since", name=op.f("pk_fault_times")),
    )


def downgrade() -> None:
    """Drop the table: what was set aside may be claimed again."""
    op.drop_table("fault_times")
