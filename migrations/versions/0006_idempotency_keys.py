"""Take idempotency keys before bodies are stored; keep both bodies that share one key."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ONE = "uq_feedback_requests_idempotency_key"
BOTH = "uq_feedback_requests_idempotency_key_body_hash"
# Before this revision a key was unique: the first request keeps it. The others lose the key only.
KEEP_FIRST = """
    UPDATE feedback_requests r SET idempotency_key = NULL
    WHERE EXISTS (SELECT FROM feedback_requests f
                  WHERE f.idempotency_key = r.idempotency_key AND f.id < r.id)
"""


def upgrade() -> None:
    """Make key and body unique together, and create the table `feedback_keys`."""
    op.drop_constraint(ONE, "feedback_requests")
    op.create_unique_constraint(BOTH, "feedback_requests", ["idempotency_key", "body_hash"])
    op.create_table(
        "feedback_keys",
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("body_hash", sa.Text(), nullable=False),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("idempotency_key", name="pk_feedback_keys"),
    )
    op.create_index("ix_feedback_keys_at", "feedback_keys", ["at"])


def downgrade() -> None:
    """Drop the table `feedback_keys`, and keep each key with its first request only."""
    op.drop_table("feedback_keys")
    op.execute(KEEP_FIRST)
    op.drop_constraint(BOTH, "feedback_requests")
    op.create_unique_constraint(ONE, "feedback_requests", ["idempotency_key"])
