"""Keep the highest version of each episode, and index the calls of each version."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# What served an episode's calls is in the calls; those of a day that was dropped leave what was
# kept of them. A row of a whole whose calls are its parts' alone has no own version.
OWN = """
    UPDATE episode_policies p SET own_latest = GREATEST(p.own_version, (
        SELECT max(t.policy_version) FROM transitions t
        WHERE t.episode_id = p.episode_id AND t.policy = p.policy))
    WHERE p.own_version IS NOT NULL
"""
WHOLE = """
    UPDATE episode_policies p SET latest = GREATEST(p.version, p.own_latest, (
        SELECT max(o.own_latest) FROM episodes e JOIN episode_policies o ON o.episode_id = e.id
        WHERE e.root = p.episode_id AND o.policy = p.policy))
"""


def upgrade() -> None:
    """Add the highest versions, computed from the calls, and the index of calls by version."""
    op.add_column("episode_policies", sa.Column("own_latest", sa.Integer()))
    op.add_column("episode_policies", sa.Column("latest", sa.Integer()))
    op.execute(OWN)
    op.execute(WHOLE)
    op.alter_column("episode_policies", "latest", nullable=False)
    op.create_index(
        "ix_transitions_called",
        "transitions",
        ["policy", "policy_version", "id"],
        postgresql_where=sa.text("policy_version > 0"),
    )


def downgrade() -> None:
    """Drop both: calls tell the highest versions."""
    op.drop_index("ix_transitions_called", "transitions")
    op.drop_column("episode_policies", "latest")
    op.drop_column("episode_policies", "own_latest")
