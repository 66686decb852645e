"""Mark versions whose files were deleted, because nothing could ask for them any more."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add when a version's files were deleted: null for all that there are."""
    op.add_column("policies", sa.Column("files_deleted_at", sa.DateTime(timezone=True)))
    op.create_check_constraint(
        op.f("ck_policies_deleted_is_not_servable"),
        "policies",
        "files_deleted_at IS NULL OR state IN ('retired', 'rejected')",
    )


def downgrade() -> None:
    """Forget which versions have no files: their folders are not there all the same."""
    op.drop_constraint(op.f("ck_policies_deleted_is_not_servable"), "policies")
    op.drop_column("policies", "files_deleted_at")
