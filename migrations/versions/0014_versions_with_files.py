"""Index the versions that have their files, which are few, however many versions there were."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Index the versions that can be asked for."""
    op.create_index(
        "ix_policies_with_files",
        "policies",
        ["name", "version"],
        postgresql_where=sa.text("files_deleted_at IS NULL"),
    )


def downgrade() -> None:
    """Drop the index."""
    op.drop_index("ix_policies_with_files", "policies")
