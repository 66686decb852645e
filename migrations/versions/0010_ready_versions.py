"""Let versions wait for those of other policies, to go live together with them."""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

NAME = "ck_policies_state_known"
BEFORE = "state IN ('written', 'published', 'serving', 'retired', 'rejected')"
AFTER = "state IN ('written', 'ready', 'published', 'serving', 'retired', 'rejected')"


def upgrade() -> None:
    """Allow the state `ready`."""
    op.drop_constraint(op.f(NAME), "policies", type_="check")
    op.create_check_constraint(op.f(NAME), "policies", AFTER)


def downgrade() -> None:
    """Let the older program probe a version that waits again."""
    op.execute("UPDATE policies SET state = 'written' WHERE state = 'ready'")
    op.drop_constraint(op.f(NAME), "policies", type_="check")
    op.create_check_constraint(op.f(NAME), "policies", BEFORE)
