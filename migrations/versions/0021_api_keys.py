"""Keep API keys: their hashes, and what each may do."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of keys; there are none yet."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("per_minute", sa.Integer()),
        sa.Column("at_once", sa.Integer()),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.text("now()"),
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.CheckConstraint(
            "per_minute > 0 AND at_once > 0", name=op.f("ck_api_keys_limits_let_some_in")
        ),
    )
    op.create_index(
        "uq_api_keys_name",
        "api_keys",
        ["name"],
        unique=True,
        postgresql_where=sa.text("revoked_at IS NULL"),
    )


def downgrade() -> None:
    """Forget all keys: those who had one lose their access, and loopback may call again."""
    op.drop_table("api_keys")
