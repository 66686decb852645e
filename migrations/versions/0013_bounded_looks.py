"""Index what is asked again and again, so that the answers do not grow with history."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

LIVE = sa.text("state IN ('written', 'ready', 'serving', 'published')")
WITHOUT_LOGPROBS = sa.text("trainable AND octet_length(sampled_logprobs) = 0")


def upgrade() -> None:
    """Index live and retired versions, base models, and calls without log-probabilities."""
    op.create_index(
        "ix_policies_base", "policies", ["served_name"], postgresql_where=sa.text("version = 0")
    )
    op.create_index("ix_policies_live", "policies", ["name"], postgresql_where=LIVE)
    op.create_index(
        "ix_policies_retired",
        "policies",
        ["name", "changed_at"],
        postgresql_where=sa.text("state = 'retired'"),
    )
    op.create_index(
        "ix_transitions_without_logprobs",
        "transitions",
        ["policy", "policy_version"],
        postgresql_where=WITHOUT_LOGPROBS,
    )


def downgrade() -> None:
    """Drop the indexes."""
    op.drop_index("ix_transitions_without_logprobs", "transitions")
    for name in ("retired", "live", "base"):
        op.drop_index(f"ix_policies_{name}", "policies")
