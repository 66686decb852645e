"""Define what each policy may claim of an episode, and what its reward is the sum of.

One row for each episode and policy that sampled a call of it
(docs/decisions/041-several-policies.md). All but the versions and the claim is copied from the
episode (`store.link.claimable`), so that one index answers what is ready for a policy.
"""

from sqlalchemy import (
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from store.schema.base import When, metadata

# The condition for an episode that a policy may claim now.
FREE = "claimed_by IS NULL AND claimable"


def minute_of(time: str) -> str:
    """Return the SQL of the minute that a time is in.

    `date_trunc` of a time with a zone depends on the session, so no index may contain it.
    """
    return f"date_bin('00:01:00'::interval, {time}, '1970-01-01 00:00:00+00'::timestamptz)"


# What a policy's reward is the sum of, where its recipe names metrics. A policy without a row has
# the metric `reward`, as `episodes` has it (docs/decisions/017-credit.md).
reward_terms = Table(
    "reward_terms",
    metadata,
    Column("policy", Text, primary_key=True),
    Column("metric", Text, primary_key=True),
    # The order in which they are added.
    Column("place", Integer, nullable=False),
    Column("weight", Double, nullable=False),
    Column("low", Double, nullable=False),
    Column("high", Double, nullable=False),
    # What counts where it was not stated; null: then there is no reward.
    Column("fallback", Double),
    # The values of what may be stated in words, by text.
    Column("texts", JSONB, nullable=False),
)

episode_policies = Table(
    "episode_policies",
    metadata,
    Column("episode_id", Uuid, ForeignKey("episodes.id"), primary_key=True),
    Column("policy", Text, primary_key=True),
    # The lowest and the highest version that served a call under the episode's own key (null: only
    # calls of its parts), then those that served a call of the whole episode. The lowest is what
    # staleness is about, the highest is what the episode goes on with
    # (docs/decisions/041-several-policies.md).
    Column("own_version", Integer),
    Column("own_latest", Integer),
    Column("version", Integer, nullable=False),
    Column("latest", Integer, nullable=False),
    Column("claimed_by", Uuid, ForeignKey("updates.id")),
    # Copied from the episode and its parts; the four about rewards are those of the policy's own
    # sum, where its recipe has one (`reward_terms`).
    Column("task", Text),
    Column("scored_at", When),
    Column("call_scored_at", When),
    Column("reward", Double),
    # Why there is no reward although something of it was stated (`store.values.rewards.Lack`).
    Column("lacks", Text),
    Column("failed", Boolean, nullable=False),
    Column("last_call_at", When, nullable=False),
    Column("claimable", Boolean, nullable=False),
    # Scored episodes that may be claimed, by task, with what tells whether they differ, so that the
    # table itself, with a row for each policy, need not be read; then all that may be claimed once
    # they are scored, by the version that sampled them.
    Index(
        "ix_episode_policies_ready",
        "policy",
        "task",
        "version",
        "scored_at",
        postgresql_include=["reward", "episode_id"],
        postgresql_where=text(f"scored_at IS NOT NULL AND {FREE}"),
    ),
    # The same episodes in the order in which groups of one are claimed (`store.ready`).
    Index(
        "ix_episode_policies_latest",
        "policy",
        text(f"{minute_of('scored_at')} DESC"),
        text("version DESC"),
        "scored_at",
        "episode_id",
        postgresql_where=text(f"scored_at IS NOT NULL AND {FREE}"),
    ),
    Index(
        "ix_episode_policies_waiting",
        "policy",
        "version",
        "episode_id",
        postgresql_where=text(FREE),
    ),
    Index(
        "ix_episode_policies_call_scored",
        "policy",
        "task",
        "version",
        postgresql_where=text(f"call_scored_at IS NOT NULL AND scored_at IS NULL AND {FREE}"),
    ),
    Index(
        "ix_episode_policies_failed",
        "policy",
        "task",
        postgresql_where=text(f"failed AND scored_at IS NULL AND {FREE}"),
    ),
    Index(
        "ix_episode_policies_lacking",
        "policy",
        "lacks",
        postgresql_where=text(f"lacks IS NOT NULL AND {FREE}"),
    ),
    Index(
        "ix_episode_policies_claimed_by",
        "claimed_by",
        postgresql_where=text("claimed_by IS NOT NULL"),
    ),
)
