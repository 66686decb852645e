"""Two bodies under one idempotency key are both kept; keys are taken before bodies are stored."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ONE = "uq_feedback_requests_idempotency_key"
BOTH = "uq_feedback_requests_idempotency_key_body_hash"
# Before this, a key stood for one request: the first keeps it, the others keep what they state.
KEEP_FIRST = """
    UPDATE feedback_requests r SET idempotency_key = NULL
    WHERE EXISTS (SELECT FROM feedback_requests f
                  WHERE f.idempotency_key = r.idempotency_key AND f.id < r.id)
"""


def upgrade() -> None:
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
    op.drop_table("feedback_keys")
    op.execute(KEEP_FIRST)
    op.drop_constraint(BOTH, "feedback_requests")
    op.create_unique_constraint(ONE, "feedback_requests", ["idempotency_key"])
