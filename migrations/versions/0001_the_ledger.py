"""Create the ledger: calls, episodes, tool events, feedback, policies, updates and keys.

Until a version is released, it makes what `store.schema.tables` defines, and no other revision is
added.
"""

from alembic import op

from store.schema.tables import metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Columns that the server does not compress: pglz takes longer than all other work on a call.
BULK = (
    *("request", "request_raw", "reply", "reply_raw"),
    *("prompt_ids", "sampled_ids", "sampled_logprobs", "policy_logprobs"),
)


def upgrade() -> None:
    """Create all tables, and the trigger that keeps policy events unchanged."""
    metadata.create_all(op.get_bind(), checkfirst=False)
    for column in BULK:
        op.execute(f"ALTER TABLE transitions ALTER {column} SET STORAGE EXTERNAL")
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
    """Drop all tables, with everything in them."""
    metadata.drop_all(op.get_bind(), checkfirst=False)
    op.execute("DROP FUNCTION refuse_change_of_event()")
