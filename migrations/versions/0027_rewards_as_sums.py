"""Let feedback be texts and withdrawals, and a policy's reward a sum of several metrics."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

ONE_VALUE = "ck_feedback_one_value"
LACKING = "ix_episode_policies_lacking"
# What the older program would take for the newest rewards of these episodes and policies.
SCORE_AGAIN = """
    WITH whole AS (
        SELECT COALESCE(p.root, p.id) AS id, f.at, f.value, f.call_id IS NULL OR p.method = 'own'
            AS of_episode
        FROM feedback f JOIN episodes p ON p.id = f.episode_id WHERE f.metric = 'reward'),
    scores AS (
        SELECT id, min(at) FILTER (WHERE of_episode) AS scored_at,
            max(at) FILTER (WHERE NOT of_episode) AS call_scored_at,
            (array_agg(value ORDER BY at DESC, value) FILTER (WHERE of_episode))[1] AS reward
        FROM whole GROUP BY id)
    UPDATE {table} e SET scored_at = s.scored_at, call_scored_at = s.call_scored_at,
        reward = s.reward
    FROM episodes o LEFT JOIN scores s ON s.id = o.id
    WHERE o.id = e.{id} AND o.root IS NULL AND (e.scored_at, e.call_scored_at, e.reward)
        IS DISTINCT FROM (s.scored_at, s.call_scored_at, s.reward)
"""


def upgrade() -> None:
    """Add texts, withdrawals and sums; all that there is counts as before."""
    op.add_column("feedback", sa.Column("label", sa.Text()))
    op.alter_column("feedback", "value", nullable=True)
    # No row that there is has a text, so that none need be read.
    op.execute(
        f"ALTER TABLE feedback ADD CONSTRAINT {ONE_VALUE}"
        " CHECK (value IS NULL OR label IS NULL) NOT VALID"
    )
    op.create_table(
        "reward_terms",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("low", sa.Double(), nullable=False),
        sa.Column("high", sa.Double(), nullable=False),
        sa.Column("fallback", sa.Double()),
        sa.Column("texts", JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "metric", name=op.f("pk_reward_terms")),
    )
    op.add_column("episode_policies", sa.Column("lacks", sa.Text()))
    op.create_index(
        LACKING,
        "episode_policies",
        ["policy", "lacks"],
        postgresql_where=sa.text("lacks IS NOT NULL AND claimed_by IS NULL AND claimable"),
    )


def downgrade() -> None:
    """Forget texts and withdrawals, which the older program cannot read, and all sums."""
    op.drop_index(LACKING, "episode_policies")
    op.drop_column("episode_policies", "lacks")
    op.drop_table("reward_terms")
    op.execute("DELETE FROM feedback WHERE value IS NULL")
    op.execute(f"ALTER TABLE feedback DROP CONSTRAINT {ONE_VALUE}")
    op.alter_column("feedback", "value", nullable=False)
    op.drop_column("feedback", "label")
    for table, column in (("episodes", "id"), ("episode_policies", "episode_id")):
        op.execute(SCORE_AGAIN.format(table=table, id=column))
