"""Keep rewards of episodes, which tell whether a task's differ; count failures as outcomes."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
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
# Only what an upstream refused for what it says is a failure; the call may be gone with its day.
FORGIVE = """
    UPDATE episodes e SET failed = false
    WHERE failed AND NOT EXISTS (
        SELECT FROM transitions t
        WHERE t.id = e.last_call_id AND t.http_status IN (400, 413, 422))
"""
BLAME = """
    UPDATE episodes e SET failed = true
    WHERE NOT failed AND EXISTS (
        SELECT FROM transitions t
        WHERE t.id = e.last_call_id AND (t.status <> 'complete' OR t.http_status >= 400))
"""
# Of a joined episode the last part decides.
COPY_FAILED = """
    UPDATE episode_policies p SET failed = l.failed
    FROM episode_policies o CROSS JOIN LATERAL (
        SELECT e.failed FROM episodes e WHERE e.id = o.episode_id OR e.root = o.episode_id
        ORDER BY e.last_call_id DESC LIMIT 1) l
    WHERE (p.episode_id, p.policy) = (o.episode_id, o.policy) AND p.failed <> l.failed
"""
INDEX = "ix_episode_policies_ready"
COLUMNS = ["policy", "task", "version", "scored_at"]
READY = sa.text("scored_at IS NOT NULL AND claimed_by IS NULL AND claimable")


def upgrade() -> None:
    """Add each episode's newest reward, beside what waits too, and look at failures again."""
    op.add_column("episodes", sa.Column("reward", sa.Double()))
    op.add_column("episode_policies", sa.Column("reward", sa.Double()))
    op.execute(FILL)
    op.execute(COPY)
    op.execute(FORGIVE)
    op.execute(COPY_FAILED)
    op.drop_index(INDEX, "episode_policies")
    op.create_index(
        INDEX,
        "episode_policies",
        COLUMNS,
        postgresql_include=["reward"],
        postgresql_where=READY,
    )


def downgrade() -> None:
    """Drop the rewards, which feedback has; whatever came to no proper reply has failed again."""
    op.execute(BLAME)
    op.execute(COPY_FAILED)
    op.drop_index(INDEX, "episode_policies")
    op.create_index(INDEX, "episode_policies", COLUMNS, postgresql_where=READY)
    op.drop_column("episode_policies", "reward")
    op.drop_column("episodes", "reward")
