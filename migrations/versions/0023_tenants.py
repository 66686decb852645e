"""Give API keys and policies a tenant: those that there are belong to the default one."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

TABLES = ("api_keys", "policies")


def upgrade() -> None:
    """Add the tenants; no name that is stored changes."""
    for table in TABLES:
        op.add_column(
            table,
            sa.Column("tenant", sa.Text(), nullable=False, server_default=sa.text("'default'")),
        )


def downgrade() -> None:
    """Revoke the keys of other tenants: they would see what is the default tenant's."""
    op.execute(
        "UPDATE api_keys SET revoked_at = COALESCE(revoked_at, now()) WHERE tenant <> 'default'"
    )
    for table in TABLES:
        op.drop_column(table, "tenant")
