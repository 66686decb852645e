"""Define the tables of sentinels: episodes that a judge scores again and again.

Nothing in them is a reward, and nothing that claims, credits or exports reads them
(docs/decisions/093-sentinels.md). A judge's name is kept as its tenant's (`store.tenants`).
"""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    Table,
    Text,
    Uuid,
    text,
)

from store.schema.base import When, metadata, one_of

OUTCOMES = ("scored", "cannot_tell", "failed", "changed")

sentinels = Table(
    "sentinels",
    metadata,
    Column("judge", Text, primary_key=True),
    Column("episode_id", Uuid, ForeignKey("episodes.id"), primary_key=True),
    Column("metric", Text, nullable=False),
    # Of the line that the judge is shown: another line is another question.
    Column("digest", Uuid, nullable=False),
    Column("draws", Integer, nullable=False),
    Column("since_round", Integer, nullable=False),
    Column("at", When, nullable=False, server_default=text("now()")),
    Index("ix_sentinels_episode_id", "episode_id"),
)

sentinel_scores = Table(
    "sentinel_scores",
    metadata,
    Column("judge", Text, primary_key=True),
    Column("episode_id", Uuid, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("outcome", Text, nullable=False),
    Column("score", Double),
    Column("reason", Text),
    Column("at", When, nullable=False, server_default=text("now()")),
    ForeignKeyConstraint(
        ["judge", "episode_id"],
        ["sentinels.judge", "sentinels.episode_id"],
        ondelete="CASCADE",
    ),
    one_of("outcome", OUTCOMES),
    CheckConstraint("(score IS NULL) = (outcome <> 'scored')", name="score_if_scored"),
)

# The figures of a round say nothing of a single episode, and stay when one is deleted.
sentinel_rounds = Table(
    "sentinel_rounds",
    metadata,
    Column("judge", Text, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("begun_at", When, nullable=False, server_default=text("now()")),
    Column("ended_at", When),
    Column("scored", Integer),
    Column("unscored", Integer),
    Column("changed", Integer),
    Column("compared", Integer),
    Column("mean", Double),
    Column("mean_absolute", Double),
    Column("evidence", Double),
    Column("drifted", Boolean),
)
