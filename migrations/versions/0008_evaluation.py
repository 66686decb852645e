"""Add splits: episodes of evaluation are never claimed."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

WAS_FREE = "claimed_by IS NULL AND root IS NULL AND quarantined_reason IS NULL"
SPLIT = "COALESCE(joined_split, split)"
FREE = f"{WAS_FREE} AND {SPLIT} = 'train'"
TASK = "COALESCE(joined_task, task)"
VERSION = "COALESCE(policy_version, 0)"
# What keeps evaluation from training in the schema before, which knows no splits.
REASON = "a call of this episode says that it is evaluation"
KEEP = f"""
    UPDATE episodes SET quarantined_reason = '{REASON}'
    WHERE {SPLIT} = 'eval' AND quarantined_reason IS NULL
"""
RESTORE = f"""
    UPDATE episodes SET split = 'eval', quarantined_reason = NULL
    WHERE quarantined_reason = '{REASON}'
"""


def upgrade() -> None:
    """Add the splits of calls and episodes; all that is stored is training's."""
    # The default is kept: a keeper of the version before may still store calls, which name none.
    for table in ("transitions", "episodes"):
        split = sa.Column("split", sa.Text(), server_default="train", nullable=False)
        op.add_column(table, split)
        name = op.f(f"ck_{table}_split_known")
        op.create_check_constraint(name, table, "split IN ('train', 'eval')")
    op.add_column("episodes", sa.Column("joined_split", sa.Text()))
    known = "joined_split IN ('train', 'eval')"
    op.create_check_constraint(op.f("ck_episodes_joined_split_known"), "episodes", known)
    op.execute(RESTORE)
    _index(FREE)
    columns = ["policy", "policy_version"]
    of_eval = sa.text(f"{SPLIT} = 'eval'")
    op.create_index("ix_episodes_eval", "episodes", columns, postgresql_where=of_eval)


def downgrade() -> None:
    """Drop the splits; episodes of evaluation are quarantined instead."""
    op.execute(KEEP)
    op.drop_index("ix_episodes_eval", "episodes")
    _index(WAS_FREE)
    op.drop_column("episodes", "joined_split")
    op.drop_column("episodes", "split")
    op.drop_column("transitions", "split")


def _index(free: str) -> None:
    """Make the indexes that claims and expiry search again, with another condition."""
    indexes = {
        "ix_episodes_ready": (
            ["policy", sa.text(TASK), sa.text(VERSION), "scored_at"],
            f"scored_at IS NOT NULL AND {free}",
        ),
        "ix_episodes_waiting": (["policy", sa.text(VERSION), "id"], free),
        "ix_episodes_call_scored": (
            ["policy", sa.text(TASK), sa.text(VERSION)],
            f"call_scored_at IS NOT NULL AND scored_at IS NULL AND {free}",
        ),
    }
    for name, (columns, condition) in indexes.items():
        op.drop_index(name, "episodes")
        op.create_index(name, "episodes", columns, postgresql_where=sa.text(condition))
