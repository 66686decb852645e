"""Keep the times in which a worker lost records without knowing whose."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; no such time is known."""
    op.create_table(
        "lapses",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("called_since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("began_before", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lapses")),
    )
    op.create_index("ix_lapses_began_before", "lapses", ["began_before"])


def downgrade() -> None:
    """Drop the table: what was set aside stays so, and calls that come later are not compared."""
    op.drop_table("lapses")
