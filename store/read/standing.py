"""Read where a policy with a gate stands: what serves, what is tried, what waits for its trial."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from store.read.pages import version_of
from store.records import Record
from store.schema.trained import LIVE, ONCE_SERVED, policy_events
from store.versions import PolicyState, PolicyVersion

_GATED: Final = text(
    f"""
    SELECT DISTINCT name FROM policies
    WHERE {LIVE} AND state IN ('candidate', 'canary', 'serving') AND gate IS NOT NULL ORDER BY name
    """
)
_STANDING: Final = text(
    f"""
    SELECT p.*, now() AS now,
        (SELECT frozen_at IS NOT NULL FROM policies b WHERE b.name = p.name AND b.version = 0)
            AS frozen
    FROM policies p
    WHERE p.name = :name AND {LIVE} AND state IN ('candidate', 'canary', 'serving')
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

    `frozen` says that only operators change which version has traffic.
    """

    now: datetime
    frozen: bool
    serving: Standing
    canary: Standing | None = None
    candidate: Standing | None = None


async def gated_policies(connection: AsyncConnection) -> list[str]:
    """Return the policies with a version that a gate decides about, or watches, by name."""
    return list((await connection.execute(_GATED)).scalars())


async def gated(connection: AsyncConnection, name: str) -> Gated | None:
    """Return where a policy stands, or None if no version of it serves: there is no such policy."""
    rows = (await connection.execute(_STANDING, {"name": name})).all()
    found: dict[PolicyState, Standing] = {row.state: _standing(row) for row in rows}
    if "serving" not in found:
        return None
    return Gated(
        now=rows[0].now,
        frozen=rows[0].frozen,
        serving=found["serving"],
        canary=found.get("canary"),
        candidate=found.get("candidate"),
    )


def _standing(row: Row[Any]) -> Standing:
    return Standing(version=version_of(row), gate=row.gate, since=row.changed_at)


async def newest_promoted(connection: AsyncConnection, name: str) -> int:
    """Return the newest version of a policy that ever got the traffic, whoever gave it that."""
    return int(await connection.scalar(_NEWEST_PROMOTED, {"name": name}) or 0)


async def promotion_evidence(
    connection: AsyncConnection, name: str, version: int
) -> Mapping[str, Any] | None:
    """Return what the version's last promotion rested on; None if it was not judged for it."""
    query = select(policy_events.c.evidence).where(
        policy_events.c.name == name,
        policy_events.c.version == version,
        policy_events.c.to_state == "serving",
    )
    evidence: Mapping[str, Any] | None = await connection.scalar(
        query.order_by(policy_events.c.id.desc()).limit(1)
    )
    return evidence
