"""Keep claims and consumptions per episode and policy, of which there may be several."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

OLD_FREE = (
    "claimed_by IS NULL AND root IS NULL AND quarantined_reason IS NULL"
    " AND COALESCE(joined_split, split) = 'train'"
)
TASK = sa.text("COALESCE(joined_task, task)")
VERSION = sa.text("COALESCE(policy_version, 0)")
FREE = "claimed_by IS NULL AND claimable"

# An episode that is held stays its holder's alone, as it was. One that is free is offered to every
# policy that sampled a call of it; and to the policy of its first call, whose day may be gone.
FILL = """
    WITH held AS (
        SELECT e.id, COALESCE(r.claimed_by, e.claimed_by) AS claimed_by
        FROM episodes e LEFT JOIN episodes r ON r.id = e.root),
    own AS (
        SELECT episode_id, policy, min(version) AS version FROM (
            SELECT t.episode_id, t.policy, COALESCE(t.policy_version, 0) AS version
            FROM transitions t JOIN held h ON h.id = t.episode_id
            WHERE t.policy IS NOT NULL AND h.claimed_by IS NULL
            UNION ALL
            SELECT e.id, e.policy, COALESCE(e.policy_version, 0)
            FROM episodes e JOIN held h ON h.id = e.id
            WHERE e.policy IS NOT NULL AND h.claimed_by IS NULL
            UNION ALL
            SELECT e.id, u.policy, COALESCE(e.policy_version, 0)
            FROM episodes e JOIN updates u ON u.id = e.claimed_by
            UNION ALL
            SELECT e.id, u.policy, COALESCE(e.policy_version, 0)
            FROM consumptions c JOIN episodes e ON e.id = c.episode_id
                JOIN updates u ON u.id = c.update_id) sampled
        GROUP BY 1, 2),
    whole AS (
        SELECT COALESCE(e.root, e.id) AS episode_id, o.policy, min(o.version) AS version
        FROM own o JOIN episodes e ON e.id = o.episode_id GROUP BY 1, 2)
    INSERT INTO episode_policies (episode_id, policy, own_version, version, claimed_by, task,
        scored_at, call_scored_at, failed, last_call_at, claimable)
    SELECT e.id, s.policy, s.own_version, s.version,
        CASE WHEN u.policy = s.policy THEN e.claimed_by END,
        COALESCE(e.joined_task, e.task), e.scored_at, e.call_scored_at,
        CASE WHEN l.last_call_id > e.last_call_id THEN l.failed ELSE e.failed END,
        GREATEST(e.last_call_at, l.last_call_at),
        e.root IS NULL AND e.quarantined_reason IS NULL
            AND COALESCE(e.joined_split, e.split) = 'train'
    FROM (SELECT episode_id, policy, o.version AS own_version,
              COALESCE(w.version, o.version) AS version
          FROM own o FULL JOIN whole w USING (episode_id, policy)) s
        JOIN episodes e ON e.id = s.episode_id LEFT JOIN updates u ON u.id = e.claimed_by
        LEFT JOIN LATERAL (
            SELECT max(p.last_call_at) AS last_call_at,
                (array_agg(p.last_call_id ORDER BY p.last_call_id DESC))[1] AS last_call_id,
                (array_agg(p.failed ORDER BY p.last_call_id DESC))[1] AS failed
            FROM episodes p WHERE e.linked AND p.root = e.id) l ON true
"""
# An episode that several policies spent is spent by one of them: that of its first call, if it did.
HOLD = """
    UPDATE episodes e SET claimed_by = p.claimed_by
    FROM (SELECT DISTINCT ON (p.episode_id) p.episode_id, p.claimed_by
          FROM episode_policies p JOIN episodes f ON f.id = p.episode_id
          WHERE p.claimed_by IS NOT NULL
          ORDER BY p.episode_id, (p.policy = f.policy) DESC NULLS LAST, p.policy) p
    WHERE e.id = p.episode_id
"""
KEEP_ONE = """
    DELETE FROM consumptions c USING episodes e
    WHERE e.id = c.episode_id AND c.update_id IS DISTINCT FROM e.claimed_by
"""


def upgrade() -> None:
    """Add what each policy may claim of an episode, and consume episodes for one policy each."""
    op.create_table(
        "episode_policies",
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("own_version", sa.Integer()),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("claimed_by", sa.Uuid()),
        sa.Column("task", sa.Text()),
        sa.Column("scored_at", sa.DateTime(timezone=True)),
        sa.Column("call_scored_at", sa.DateTime(timezone=True)),
        sa.Column("failed", sa.Boolean(), nullable=False),
        sa.Column("last_call_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("claimable", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("episode_id", "policy", name=op.f("pk_episode_policies")),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name=op.f("fk_episode_policies_episode_id")
        ),
        sa.ForeignKeyConstraint(
            ["claimed_by"], ["updates.id"], name=op.f("fk_episode_policies_claimed_by")
        ),
    )
    op.execute(FILL)
    _index("ready", ["task", "version", "scored_at"], f"scored_at IS NOT NULL AND {FREE}")
    _index("waiting", ["version", "episode_id"], FREE)
    unscored = f"scored_at IS NULL AND {FREE}"
    _index("call_scored", ["task", "version"], f"call_scored_at IS NOT NULL AND {unscored}")
    _index("failed", ["task"], f"failed AND {unscored}")
    op.create_index(
        "ix_episode_policies_claimed_by",
        "episode_policies",
        ["claimed_by"],
        postgresql_where=sa.text("claimed_by IS NOT NULL"),
    )
    for index in ("ready", "waiting", "call_scored", "failed", "claimed_by"):
        op.drop_index(f"ix_episodes_{index}", "episodes")
    op.drop_column("episodes", "claimed_by")

    op.drop_constraint(op.f("uq_policies_served_name"), "policies")
    op.create_index(
        "uq_policies_served_name",
        "policies",
        ["served_name"],
        unique=True,
        postgresql_where=sa.text("version > 0"),
    )

    op.add_column("consumptions", sa.Column("policy", sa.Text()))
    op.execute(
        "UPDATE consumptions c SET policy = u.policy FROM updates u WHERE u.id = c.update_id"
    )
    op.alter_column("consumptions", "policy", nullable=False)
    op.drop_constraint(op.f("fk_consumptions_episode_id"), "consumptions")
    op.drop_constraint(op.f("pk_consumptions"), "consumptions")
    op.create_primary_key(op.f("pk_consumptions"), "consumptions", ["episode_id", "policy"])
    op.create_foreign_key(
        op.f("fk_consumptions_episode_id"),
        "consumptions",
        "episode_policies",
        ["episode_id", "policy"],
        ["episode_id", "policy"],
    )


def downgrade() -> None:
    """Give each episode to one policy again: what a second one spent of it is lost.

    A base model is served under its policy's name again.
    """
    op.drop_index("uq_policies_served_name", "policies")
    op.execute("UPDATE policies SET served_name = name WHERE version = 0")
    op.create_unique_constraint(op.f("uq_policies_served_name"), "policies", ["served_name"])
    op.add_column("episodes", sa.Column("claimed_by", sa.Uuid()))
    op.execute(HOLD)
    op.execute(KEEP_ONE)
    op.create_foreign_key(
        op.f("fk_episodes_claimed_by"), "episodes", "updates", ["claimed_by"], ["id"]
    )
    op.drop_constraint(op.f("fk_consumptions_episode_id"), "consumptions")
    op.drop_constraint(op.f("pk_consumptions"), "consumptions")
    op.drop_column("consumptions", "policy")
    op.create_primary_key(op.f("pk_consumptions"), "consumptions", ["episode_id"])
    op.create_foreign_key(
        op.f("fk_consumptions_episode_id"), "consumptions", "episodes", ["episode_id"], ["id"]
    )
    op.drop_table("episode_policies")
    scored = f"scored_at IS NOT NULL AND {OLD_FREE}"
    _old_index("ready", ["policy", TASK, VERSION, "scored_at"], scored)
    _old_index("waiting", ["policy", VERSION, "id"], OLD_FREE)
    by_call = f"call_scored_at IS NOT NULL AND scored_at IS NULL AND {OLD_FREE}"
    _old_index("call_scored", ["policy", TASK, VERSION], by_call)
    failed = "failed AND scored_at IS NULL AND claimed_by IS NULL"
    _old_index("failed", ["policy", "linked", TASK], failed)
    _old_index("claimed_by", ["claimed_by"], "claimed_by IS NOT NULL")


def _index(name: str, columns: list[str], where: str) -> None:
    op.create_index(
        f"ix_episode_policies_{name}",
        "episode_policies",
        ["policy", *columns],
        postgresql_where=sa.text(where),
    )


def _old_index(name: str, columns: list[str | sa.TextClause], where: str) -> None:
    op.create_index(f"ix_episodes_{name}", "episodes", columns, postgresql_where=sa.text(where))
