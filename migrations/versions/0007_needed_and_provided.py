"""Rename both sides of a join to what a call needs and provides, and drop `api_keys`."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# In the order in which a keeper that still runs locks them: `offers` first.
TABLES = {"offers": "provided_fingerprints", "asks": "needed_fingerprints"}
COLUMNS = {"asked_by": "needed_by", "offered_by": "provided_by", "worn": "too_common"}
INDEXES = {
    "ix_offers_digest": "ix_provided_fingerprints_digest",
    "ix_asks_digest": "ix_needed_fingerprints_digest",
    "ix_asks_call_id": "ix_needed_fingerprints_call_id",
    "ix_links_asked_by": "ix_links_needed_by",
    "ix_links_offered_by": "ix_links_provided_by",
}


def upgrade() -> None:
    """Rename tables, columns and indexes, and drop `api_keys`, which nothing has ever written."""
    for old, new in TABLES.items():
        op.rename_table(old, new)
    for old, new in COLUMNS.items():
        op.alter_column("links", old, new_column_name=new)
    for old, new in INDEXES.items():
        op.execute(f"ALTER INDEX {old} RENAME TO {new}")
    op.drop_table("api_keys")


def downgrade() -> None:
    """Give tables, columns and indexes their old names, and create `api_keys` again, empty."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
        sa.UniqueConstraint("name", name=op.f("uq_api_keys_name")),
    )
    for old, new in TABLES.items():
        op.rename_table(new, old)
    for old, new in COLUMNS.items():
        op.alter_column("links", new, new_column_name=old)
    for old, new in INDEXES.items():
        op.execute(f"ALTER INDEX {new} RENAME TO {old}")
