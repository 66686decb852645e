"""Limit the tokens that a key may take in a minute."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the limit; no key has one yet."""
    op.add_column("api_keys", sa.Column("tokens_per_minute", sa.Integer()))
    op.create_check_constraint(
        op.f("ck_api_keys_tokens_let_some_in"), "api_keys", "tokens_per_minute > 0"
    )


def downgrade() -> None:
    """Forget the limit: keys are then only limited in their requests."""
    op.drop_column("api_keys", "tokens_per_minute")
