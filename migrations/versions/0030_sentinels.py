"""Keep sentinels: episodes that a judge scores again and again, and what it scored them."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

WHEN = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add the tables; no judge has sentinels."""
    op.create_table(
        "sentinels",
        sa.Column("judge", sa.Text(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("digest", sa.Uuid(), nullable=False),
        sa.Column("draws", sa.Integer(), nullable=False),
        sa.Column("since_round", sa.Integer(), nullable=False),
        sa.Column("at", WHEN, server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name=op.f("fk_sentinels_episode_id")
        ),
        sa.PrimaryKeyConstraint("judge", "episode_id", name=op.f("pk_sentinels")),
    )
    op.create_index("ix_sentinels_episode_id", "sentinels", ["episode_id"])
    op.create_table(
        "sentinel_scores",
        sa.Column("judge", sa.Text(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("at", WHEN, server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "outcome IN ('scored', 'cannot_tell', 'failed', 'changed')",
            name=op.f("ck_sentinel_scores_outcome_known"),
        ),
        sa.CheckConstraint(
            "(score IS NULL) = (outcome <> 'scored')",
            name=op.f("ck_sentinel_scores_score_if_scored"),
        ),
        sa.ForeignKeyConstraint(
            ["judge", "episode_id"],
            ["sentinels.judge", "sentinels.episode_id"],
            name=op.f("fk_sentinel_scores_judge"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("judge", "episode_id", "round", name=op.f("pk_sentinel_scores")),
    )
    op.create_table(
        "sentinel_rounds",
        sa.Column("judge", sa.Text(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("begun_at", WHEN, server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", WHEN, nullable=True),
        sa.Column("scored", sa.Integer(), nullable=True),
        sa.Column("unscored", sa.Integer(), nullable=True),
        sa.Column("changed", sa.Integer(), nullable=True),
        sa.Column("compared", sa.Integer(), nullable=True),
        sa.Column("mean", sa.Double(), nullable=True),
        sa.Column("mean_absolute", sa.Double(), nullable=True),
        sa.Column("evidence", sa.Double(), nullable=True),
        sa.Column("drifted", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("judge", "round", name=op.f("pk_sentinel_rounds")),
    )


def downgrade() -> None:
    """Drop the tables: judges have no sentinels any more."""
    op.drop_table("sentinel_rounds")
    op.drop_table("sentinel_scores")
    op.drop_table("sentinels")
