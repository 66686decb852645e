"""Rewards of episodes: what tells whether the episodes of a task differ."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# As `store.link.settle` computes it from now on: of the parts' newest rewards for the whole.
FILL = """
    WITH said AS (
        SELECT COALESCE(e.root, e.id) AS whole, f.at, f.value
        FROM feedback f JOIN episodes e ON e.id = f.episode_id
        WHERE f.metric = 'reward' AND (f.call_id IS NULL OR e.method = 'own')
        UNION ALL
        SELECT e.id, f.at, f.value
        FROM feedback f JOIN episodes e ON e.id = f.episode_id
        WHERE f.metric = 'reward' AND (f.call_id IS NULL OR e.method = 'own')
            AND e.root IS NOT NULL)
    UPDATE episodes e SET reward = s.reward
    FROM (SELECT whole, (array_agg(value ORDER BY at DESC, value))[1] AS reward
          FROM said GROUP BY whole) s
    WHERE e.id = s.whole
"""
COPY = """
    UPDATE episode_policies p SET reward = e.reward
    FROM episodes e WHERE e.id = p.episode_id AND e.reward IS NOT NULL
"""
INDEX = "ix_episode_policies_ready"
COLUMNS = ["policy", "task", "version", "scored_at"]
READY = sa.text("scored_at IS NOT NULL AND claimed_by IS NULL AND claimable")


def upgrade() -> None:
    """Add each episode's newest reward, and put it beside what waits to be claimed."""
    op.add_column("episodes", sa.Column("reward", sa.Double()))
    op.add_column("episode_policies", sa.Column("reward", sa.Double()))
    op.execute(FILL)
    op.execute(COPY)
    op.drop_index(INDEX, "episode_policies")
    op.create_index(
        INDEX,
        "episode_policies",
        COLUMNS,
        postgresql_include=["reward"],
        postgresql_where=READY,
    )


def downgrade() -> None:
    """Drop the rewards; feedback has them."""
    op.drop_index(INDEX, "episode_policies")
    op.create_index(INDEX, "episode_policies", COLUMNS, postgresql_where=READY)
    op.drop_column("episode_policies", "reward")
    op.drop_column("episodes", "reward")
