"""Record each change of a version's state; let versions be tried, and rolled back."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

STATES = "ck_policies_state_known"
BEFORE = ("written", "ready", "published", "serving", "retired", "rejected")
AFTER = (
    "written",
    "ready",
    "candidate",
    "canary",
    "serving",
    "published",
    "rolled_back",
    "retired",
    "rejected",
)
ACTORS = ("trainer", "steward", "operator", "import")
ARMS = ("base", "serving", "canary")
FOR_GOOD = (
    "CASE WHEN rolled_back_at IS NULL THEN state <> 'rolled_back'"
    " ELSE state IN ('rolled_back', 'retired') END"
)
LIVE_BEFORE = "state IN ('written', 'ready', 'serving', 'published')"
LIVE_AFTER = (
    "state IN ('written', 'ready', 'candidate', 'canary', 'serving', 'published', 'rolled_back')"
)
COLUMNS = ("share", "gate", "rolled_back_at", "frozen_at")


def upgrade() -> None:
    """Add states, events and arms; no version that there is has an event of before."""
    op.add_column("policies", sa.Column("share", sa.Double()))
    op.add_column("policies", sa.Column("gate", JSONB()))
    for column in ("rolled_back_at", "frozen_at"):
        op.add_column("policies", sa.Column(column, sa.DateTime(timezone=True)))
    _allow(AFTER, LIVE_AFTER)
    op.create_check_constraint(
        op.f("ck_policies_share_is_a_share"), "policies", "share >= 0 AND share <= 1"
    )
    op.create_check_constraint(op.f("ck_policies_rolled_back_for_good"), "policies", FOR_GOOD)
    op.create_index(
        "uq_policies_canary",
        "policies",
        ["name"],
        unique=True,
        postgresql_where=sa.text("state = 'canary'"),
    )
    op.create_index(
        "ix_policies_rolled_back",
        "policies",
        ["name", "version"],
        postgresql_where=sa.text("rolled_back_at IS NOT NULL"),
    )
    _add_events()
    op.add_column("transitions", sa.Column("arm", sa.Text()))
    # Of the calls that there are none has an arm, so that they need not be read: that would take
    # long, with a lock that keeps all others from them.
    op.execute(
        "ALTER TABLE transitions ADD CONSTRAINT ck_transitions_arm_known"
        f" CHECK ({_is_in('arm', ARMS)}) NOT VALID"
    )


def _add_events() -> None:
    op.create_table(
        "policy_events",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("from_state", sa.Text()),
        sa.Column("to_state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("evidence", JSONB()),
        sa.Column(
            "at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.CheckConstraint(
            _is_in("from_state", AFTER), name=op.f("ck_policy_events_from_state_known")
        ),
        sa.CheckConstraint(_is_in("to_state", AFTER), name=op.f("ck_policy_events_to_state_known")),
        sa.CheckConstraint(_is_in("actor", ACTORS), name=op.f("ck_policy_events_actor_known")),
        sa.ForeignKeyConstraint(
            ["name", "version"],
            ["policies.name", "policies.version"],
            name=op.f("fk_policy_events_name"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_events")),
    )
    op.create_index("ix_policy_events_version", "policy_events", ["name", "version", "id"])


def downgrade() -> None:
    """Forget the events; nothing that was rolled back, or is only tried, gets traffic again.

    A canary's episodes go on with the version that serves. What waits for its canary is probed
    again, and then serves at once, as the older program knows no gate.
    """
    op.drop_column("transitions", "arm")
    op.drop_table("policy_events")
    for index in ("uq_policies_canary", "ix_policies_rolled_back"):
        op.drop_index(index, "policies")
    for name in ("share_is_a_share", "rolled_back_for_good"):
        op.drop_constraint(op.f(f"ck_policies_{name}"), "policies", type_="check")
    op.execute("UPDATE policies SET state = 'written' WHERE state = 'candidate'")
    op.execute("UPDATE policies SET state = 'retired' WHERE state IN ('canary', 'rolled_back')")
    _allow(BEFORE, LIVE_BEFORE)
    for column in COLUMNS:
        op.drop_column("policies", column)


def _allow(states: tuple[str, ...], live: str) -> None:
    op.drop_constraint(op.f(STATES), "policies", type_="check")
    op.create_check_constraint(op.f(STATES), "policies", _is_in("state", states))
    op.drop_index("ix_policies_live", "policies")
    op.create_index("ix_policies_live", "policies", ["name"], postgresql_where=sa.text(live))


def _is_in(column: str, values: tuple[str, ...]) -> str:
    quoted = ", ".join(f"'{value}'" for value in values)
    return f"{column} IN ({quoted})"
