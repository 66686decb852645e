"""Let episodes be deleted, and days be dropped: tombstones, and indexes by which all is found."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

BY_EPISODE = ("provided_fingerprints", "needed_fingerprints")


def upgrade() -> None:
    """Add the tombstones, the time of a deletion, and the indexes."""
    op.create_table(
        "deleted_names",
        sa.Column("digest", sa.Uuid(), nullable=False),
        sa.Column("deletion", sa.BigInteger(), nullable=False),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_deleted_names")),
    )
    op.create_index("ix_deleted_names_deletion", "deleted_names", ["deletion"])
    op.add_column("episodes", sa.Column("deleted_at", sa.DateTime(timezone=True)))
    op.create_table(
        "dropped_days",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_dropped_days")),
    )
    op.create_index(
        "ix_episodes_there", "episodes", ["id"], postgresql_where=sa.text("deleted_at IS NULL")
    )
    op.create_index("ix_feedback_request_id", "feedback", ["request_id"])
    for table in BY_EPISODE:
        op.create_index(f"ix_{table}_episode_id", table, ["episode_id"], postgresql_using="brin")


def downgrade() -> None:
    """Forget what was deleted: a record of it that comes again is stored again."""
    for table in BY_EPISODE:
        op.drop_index(f"ix_{table}_episode_id", table)
    op.drop_index("ix_feedback_request_id", "feedback")
    op.drop_index("ix_episodes_there", "episodes")
    op.drop_table("dropped_days")
    op.drop_column("episodes", "deleted_at")
    op.drop_table("deleted_names")
