"""Refuse to change or delete an event of a version: PostgreSQL itself holds that they are added."""

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the trigger. Whole tables can still be emptied, as when a database is set up anew."""
    op.execute(
        """
        CREATE FUNCTION refuse_change_of_event() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'policy_events are only added: the event % stays as it is', OLD.id
                USING ERRCODE = 'restrict_violation',
                    HINT = 'Say what has changed since by another event: pawl policies --help.';
        END
        $$
        """
    )
    op.execute(
        """
        CREATE TRIGGER policy_events_stay BEFORE UPDATE OR DELETE ON policy_events
        FOR EACH ROW EXECUTE FUNCTION refuse_change_of_event()
        """
    )


def downgrade() -> None:
    """Drop the trigger: only the programs hold that events stay."""
    op.execute("DROP TRIGGER policy_events_stay ON policy_events")
    op.execute("DROP FUNCTION refuse_change_of_event()")
