"""Read where a policy with a gate stands: what serves, what is tried, what waits for its trial."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.link.scores import reward_rule
from store.records import Record
from store.schema.trained import LIVE, ONCE_SERVED
from store.versions import Actor, PolicyState, PolicyVersion, version_of

_GATED: Final = text(
    f"""
    SELECT DISTINCT name FROM policies
    WHERE {LIVE} AND state IN ('candidate', 'canary', 'serving') AND gate IS NOT NULL ORDER BY name
    """
)
_STANDING: Final = text(
    f"""
    SELECT p.*, now() AS now, frozen, base_share
    FROM policies p JOIN (
        SELECT name, frozen_at IS NOT NULL AS frozen, COALESCE(share, 0) AS base_share
        FROM policies WHERE version = 0) b USING (name)
    WHERE name = :name AND {LIVE} AND state IN ('candidate', 'canary', 'serving')
    """
)


# What served before events were kept has none.
_NEWEST_PROMOTED: Final = text(
    f"""
    SELECT GREATEST(
        (SELECT max(version) FROM policies
            WHERE name = :name AND (state = 'serving' OR {ONCE_SERVED})),
        (SELECT version FROM policy_events
            WHERE name = :name AND to_state = 'serving' ORDER BY version DESC LIMIT 1), 0)
    """
)


# Numbers are given in the order in which versions are made. The base model, which had the traffic
# at first, and may have it again, is there unless what is left out came after it.
_TERMS: Final = text(
    """
    SELECT version, v.at AS since, COALESCE(
            v.actor = 'trainer' AND p.gate->>'mode' = 'immediate', false) AS is_untried,
        p.gate->>'reward' AS reward
    FROM policy_events v JOIN policies p USING (name, version)
    WHERE name = :name AND v.to_state = 'serving' AND p.rolled_back_at IS NULL
        AND (version > 0 AND version BETWEEN :least AND :serving
            OR version = 0 AND NOT EXISTS (
                SELECT FROM policy_events o WHERE o.name = v.name AND o.to_state = 'serving'
                    AND o.version > 0 AND o.version < :least AND o.at > v.at))
    ORDER BY v.at, v.id
    """
)
_SERVED_AT: Final = text(
    """
    SELECT max(version) FROM policy_events
    WHERE name = :name AND to_state = 'serving' AND at <= :at AND version BETWEEN 1 AND :serving
    """
)
# So many numbers before what served when the newest episodes began that count, a version is of
# another time.
FAR: Final = 64


# By the clock of the database: ids are made by those of several machines. What a trial has shown
# holds whenever the version serves: after a roll-back, or by hand, it gets the traffic without one.
_PROMOTION: Final = text(
    """
    WITH promoted AS MATERIALIZED (
        SELECT id, at, actor, jsonb_exists(evidence, 'reference') AS is_tried FROM policy_events
        WHERE name = :name AND version = :version AND to_state = 'serving')
    SELECT p.actor, t.evidence, t.at
    FROM (SELECT actor FROM promoted ORDER BY at DESC, id DESC LIMIT 1) p
    LEFT JOIN policy_events t ON t.id = (
        SELECT id FROM promoted WHERE is_tried ORDER BY at DESC, id DESC LIMIT 1)
    """
)


class Standing(Record, frozen=True, kw_only=True):
    """Describe a version that has a part in a gate.

    `gate` is the rule of the recipe that made it a candidate, None if it never was one; `since` is
    when it got its state.
    """

    version: PolicyVersion
    gate: Mapping[str, Any] | None
    since: datetime


class Gated(Record, frozen=True, kw_only=True):
    """Describe a policy at the time `now` of the database: of each part one version at most.

    `frozen` says that only operators change which version has traffic. `base_share` is the share of
    new episodes that the base model keeps. `reward` is the digest of what rewards are made by now.
    """

    now: datetime
    frozen: bool
    serving: Standing
    canary: Standing | None = None
    candidate: Standing | None = None
    base_share: float = 0.0
    reward: str | None = None


class Promotion(Record, frozen=True, kw_only=True):
    """Say who gave a version the traffic last, and what its trial had shown before.

    `evidence` is that of the newest promotion by a trial, and `tried_at` its time, whoever gave it
    the traffic again since; empty and None if it never was promoted for a trial.
    """

    actor: Actor
    evidence: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tried_at: datetime | None = None


class Term(Record, frozen=True, kw_only=True):
    """Say when a version got the traffic, and whether as it was made, untried, to be watched.

    `reward` is the digest of what its rewards were made by; None: of what they are made by now.
    """

    version: int
    since: datetime
    is_untried: bool
    reward: str | None = None


_UNRULED: Final = text(
    "SELECT name FROM policies WHERE state = 'serving' AND version > 0 AND gate IS NULL"
)


async def unruled_policies(connection: AsyncConnection) -> set[str]:
    """Return the policies of which a trained version serves without a rule to judge it by."""
    return set((await connection.execute(_UNRULED)).scalars())


async def gated_policies(connection: AsyncConnection) -> list[str]:
    """Return the policies with a version that a gate decides about, or watches, by name."""
    return list((await connection.execute(_GATED)).scalars())


async def gated(connection: AsyncConnection, name: str) -> Gated | None:
    """Return where a policy stands, or None if no version of it serves: there is no such policy.

    What its rewards are made by stays so until the transaction ends.
    """
    # First, since whoever reads it keeps it from being changed: what comes after is of that time.
    reward = (await reward_rule(connection, name)).digest
    rows = (await connection.execute(_STANDING, {"name": name})).all()
    by_state: dict[PolicyState, Standing] = {row.state: _standing(row) for row in rows}
    if "serving" not in by_state:
        return None
    return Gated(
        now=rows[0].now,
        frozen=rows[0].frozen,
        base_share=rows[0].base_share,
        reward=reward,
        serving=by_state["serving"],
        canary=by_state.get("canary"),
        candidate=by_state.get("candidate"),
    )


def _standing(row: Row[Any]) -> Standing:
    return Standing(version=version_of(row), gate=row.gate, since=row.changed_at)


async def newest_promoted(connection: AsyncConnection, name: str) -> int:
    """Return the newest version of a policy that ever got the traffic, whoever gave it that."""
    return int(await connection.scalar(_NEWEST_PROMOTED, {"name": name}) or 0)


async def promotion(connection: AsyncConnection, name: str, version: int) -> Promotion | None:
    """Return the version's last promotion; None if it served before events were kept."""
    row = (await connection.execute(_PROMOTION, {"name": name, "version": version})).first()
    if row is None:
        return None
    return Promotion(actor=row.actor, evidence=row.evidence or {}, tried_at=row.at)


async def terms(
    connection: AsyncConnection, name: str, serving: int, counted: datetime
) -> list[Term]:
    """Return the times at which versions got the traffic, up to that of what serves, oldest first.

    Versions that were rolled back are left out, and those from long before what served at the time
    `counted`: before it the newest episodes began that count yet.
    """
    values: dict[str, Any] = {"name": name, "serving": serving}
    then = await connection.scalar(_SERVED_AT, values | {"at": counted})
    values["least"] = (then or 1) - FAR + 1
    return [Term(**row._mapping) for row in await connection.execute(_TERMS, values)]
