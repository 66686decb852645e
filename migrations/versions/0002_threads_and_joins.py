"""Store calls as additions to earlier calls, and join episodes in the store."""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

from store.values.delta import rebuild

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

CALLS = (
    "SELECT id, parent_id, request, request_prefix, request_suffix, prompt_ids, prompt_prefix,"
    " sampled_ids FROM transitions"
)
BATCH = 200
TEXTS = ("request", "reply")
# Columns that the server does not compress: pglz takes longer than all other work on a call.
BULK = (
    *("request", "request_raw", "reply", "reply_raw"),
    *("prompt_ids", "sampled_ids", "sampled_logprobs"),
)


def upgrade() -> None:
    """Store JSON bodies as bytes, and add the columns and tables for threads and joins."""
    for column in TEXTS:
        op.alter_column(
            "transitions",
            column,
            type_=sa.LargeBinary(),
            postgresql_using=f"convert_to({column}::text, 'UTF8')",
        )
    op.add_column("transitions", sa.Column("method", sa.Text()))
    op.execute(
        "UPDATE transitions t SET method = e.method FROM episodes e WHERE e.id = t.episode_id"
    )
    op.alter_column("transitions", "method", nullable=False)
    op.add_column(
        "transitions",
        sa.Column("confidence", sa.Text(), server_default="certain", nullable=False),
    )
    op.alter_column("transitions", "confidence", server_default=None)
    op.create_check_constraint(
        op.f("ck_transitions_confidence_known"),
        "transitions",
        "confidence IN ('certain', 'likely', 'doubtful')",
    )
    op.add_column("transitions", sa.Column("retry_of", sa.Uuid()))
    op.add_column("transitions", sa.Column("parent_id", sa.Uuid()))
    for column in ("request_prefix", "request_suffix", "prompt_prefix"):
        op.add_column("transitions", sa.Column(column, sa.Integer()))
    op.drop_constraint(op.f("fk_transitions_episode_id"), "transitions")
    for column in BULK:
        op.execute(f"ALTER TABLE transitions ALTER {column} SET STORAGE EXTERNAL")

    op.add_column(
        "episodes",
        sa.Column("doubtful", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
    op.add_column(
        "episodes",
        sa.Column("linked", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
    op.add_column("episodes", sa.Column("task_from", sa.Uuid()))
    op.execute("UPDATE episodes SET task_from = first_call_id WHERE task IS NOT NULL")
    op.add_column("episodes", sa.Column("root", sa.Uuid()))
    op.add_column("episodes", sa.Column("joined_task", sa.Text()))
    op.add_column("episodes", sa.Column("quarantined_reason", sa.Text()))
    op.create_index(
        "ix_episodes_root", "episodes", ["root"], postgresql_where=sa.text("root IS NOT NULL")
    )
    op.drop_index("ix_episodes_claimed_by", "episodes")
    op.create_index(
        "ix_episodes_claimed_by",
        "episodes",
        ["claimed_by"],
        postgresql_where=sa.text("claimed_by IS NOT NULL"),
    )
    op.drop_index("ix_episodes_last_call_at", "episodes")
    op.create_index(
        "ix_episodes_last_call_at", "episodes", ["last_call_at"], postgresql_using="brin"
    )

    op.create_table(
        "offers",
        sa.Column("digest", sa.Uuid(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=False),
    )
    op.create_index("ix_offers_digest", "offers", ["digest"])
    op.create_table(
        "asks",
        sa.Column("digest", sa.Uuid(), nullable=False),
        sa.Column("call_id", sa.Uuid(), nullable=False),
        sa.Column("episode_id", sa.Uuid(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
    )
    op.create_index("ix_asks_digest", "asks", ["digest"])
    op.create_index("ix_asks_call_id", "asks", ["call_id"])
    op.create_table(
        "links",
        sa.Column("call_id", sa.Uuid(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("offered_by", sa.Uuid(), nullable=False),
        sa.Column("asked_by", sa.Uuid(), nullable=False),
        sa.Column("worn", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("call_id", "level", "offered_by", name=op.f("pk_links")),
    )
    op.create_index("ix_links_offered_by", "links", ["offered_by"])
    op.create_index("ix_links_asked_by", "links", ["asked_by"])


def downgrade() -> None:
    """Rebuild whole requests, merge joined episodes for good, and drop the columns and tables."""
    connection = op.get_bind()
    for rows in _threads(connection):
        whole = _whole([*rows, *_bases(connection, rows)])
        connection.execute(
            sa.text(
                "UPDATE transitions SET request = :request, prompt_ids = :ids, parent_id = NULL"
                " WHERE id = :id"
            ),
            [
                {"id": row.id, "request": whole[row.id][0], "ids": whole[row.id][1]}
                for row in rows
                if row.parent_id is not None
            ],
        )
    _merge_parts()
    # Before this revision, feedback on the one call of an episode of method `own` named no call.
    op.execute(
        "UPDATE feedback f SET call_id = NULL FROM episodes e"
        " WHERE e.id = f.episode_id AND e.method = 'own'"
    )
    op.drop_table("links")
    op.drop_table("asks")
    op.drop_table("offers")
    op.drop_index("ix_episodes_last_call_at", "episodes")
    op.create_index("ix_episodes_last_call_at", "episodes", ["last_call_at"])
    op.drop_index("ix_episodes_claimed_by", "episodes")
    op.create_index("ix_episodes_claimed_by", "episodes", ["claimed_by"])
    op.drop_index("ix_episodes_root", "episodes")
    for column in ("quarantined_reason", "joined_task", "root", "linked", "doubtful", "task_from"):
        op.drop_column("episodes", column)
    op.create_foreign_key(
        op.f("fk_transitions_episode_id"), "transitions", "episodes", ["episode_id"], ["id"]
    )
    for column in ("prompt_prefix", "request_suffix", "request_prefix", "parent_id"):
        op.drop_column("transitions", column)
    for column in ("retry_of", "confidence", "method"):
        op.drop_column("transitions", column)
    for column in BULK:
        op.execute(f"ALTER TABLE transitions ALTER {column} SET STORAGE EXTENDED")
    for column in TEXTS:
        op.alter_column(
            "transitions",
            column,
            type_=sa.JSON(),
            postgresql_using=f"convert_from({column}, 'UTF8')::json",
        )


def _threads(connection: sa.Connection) -> Iterator[Any]:
    """Yield the calls of the episodes that have additions, in batches of episodes."""
    ids = list(
        connection.scalars(
            sa.text("SELECT DISTINCT episode_id FROM transitions WHERE parent_id IS NOT NULL")
        )
    )
    for start in range(0, len(ids), BATCH):
        yield connection.execute(
            sa.text(f"{CALLS} WHERE episode_id = ANY(:ids)"), {"ids": ids[start : start + BATCH]}
        ).all()


def _bases(connection: sa.Connection, rows: Any) -> list[Any]:
    """Read the calls of other episodes that these calls add to, directly or not."""
    bases: list[Any] = []
    known = {row.id for row in rows}
    missing = {row.parent_id for row in rows if row.parent_id is not None} - known
    while missing:
        more = connection.execute(
            sa.text(f"{CALLS} WHERE id = ANY(:ids)"), {"ids": list(missing)}
        ).all()
        bases += more
        known |= missing
        missing = {row.parent_id for row in more if row.parent_id is not None} - known
    return bases


def _whole(rows: Any) -> dict[Any, tuple[bytes, bytes]]:
    by_id = {row.id: row for row in rows}
    rebuilt: dict[Any, tuple[bytes, bytes]] = {}
    for row in rows:
        chain = [row]
        while chain[-1].id not in rebuilt and chain[-1].parent_id is not None:
            chain.append(by_id[chain[-1].parent_id])
        for call in reversed(chain):
            if call.id in rebuilt:
                continue
            request, ids = call.request, call.prompt_ids
            if call.parent_id is not None:
                base_request, base_ids = rebuilt[call.parent_id]
                base_ids += by_id[call.parent_id].sampled_ids
                request = rebuild(base_request, call.request_prefix, call.request_suffix, request)
                ids = rebuild(base_ids, call.prompt_prefix, 0, ids)
            rebuilt[call.id] = request, ids
    return rebuilt


def _merge_parts() -> None:
    for table in ("transitions", "tool_events", "feedback"):
        op.execute(
            f"UPDATE {table} t SET episode_id = e.root FROM episodes e"
            " WHERE e.id = t.episode_id AND e.root IS NOT NULL"
        )
    op.execute(
        "UPDATE episodes r SET last_call_at = greatest(r.last_call_at, p.at)"
        " FROM (SELECT root, max(last_call_at) AS at FROM episodes GROUP BY root) p"
        " WHERE p.root = r.id"
    )
    op.execute(
        "UPDATE episodes SET task = joined_task, task_named = true WHERE joined_task IS NOT NULL"
    )
    op.execute("DELETE FROM episodes WHERE root IS NOT NULL")
