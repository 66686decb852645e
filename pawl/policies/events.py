"""Show how the versions of a policy got their states, and what a version on trial has come to."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from msgspec import UNSET, UnsetType
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.commands.common import cell
from pawl.policies.lookup import policy_versions
from pawl.steward.evidence import OnTrial, rule_of
from pawl.steward.gate.records import Decision
from pawl.steward.watching import why_not_in_line, why_unwatched
from store.read.events import list_events, why_stays
from store.read.standing import gated, promotion, terms
from store.records import Record
from store.versions import Actor, PolicyState

# As many as are shown, the newest.
MOST_EVENTS = 100


class EventLine(Record, frozen=True, kw_only=True):
    """Describe one change of a version's state, with the fields in the order they are written in.

    `evidence` is there only if the change was decided by it.
    """

    at: datetime
    version: str
    from_state: PolicyState | None
    to_state: PolicyState
    reason: str
    actor: Actor
    evidence: dict[str, Any] | UnsetType = UNSET


async def events_of(engine: AsyncEngine, name: str, tenant: str | None = None) -> list[EventLine]:
    """Return the newest changes of states of a policy's versions, oldest first.

    With `tenant` the policy must be that tenant's.

    Raises:
        UnknownPolicy: there is no policy of that name; the message names those that there are.
    """
    async with engine.connect() as connection:
        await policy_versions(connection, name, tenant)
        events = await list_events(connection, name, most=MOST_EVENTS)
    return [
        EventLine(
            at=event.at,
            version=f"{name}@{event.version}",
            from_state=event.from_state,
            to_state=event.to_state,
            reason=event.reason,
            actor=event.actor,
            evidence=UNSET if event.evidence is None else dict(event.evidence),
        )
        for event in reversed(events)
    ]


def events_table(lines: Sequence[EventLine]) -> Table:
    """Return the lines as a table for a terminal; what decided is in the JSON lines alone."""
    grid = Table(box=None, pad_edge=False)
    for name in ("at", "version", "state", "by", "why"):
        grid.add_column(name, no_wrap=name != "why")
    for line in lines:
        before = "" if line.from_state in (None, line.to_state) else f"{line.from_state} → "
        state = before + line.to_state
        at = f"{line.at.astimezone():%Y-%m-%d %H:%M:%S}"
        grid.add_row(*map(cell, (at, line.version, state, line.actor, line.reason)))
    return grid


async def unwatched_of(connection: AsyncConnection, name: str) -> str | None:
    """Return why live rewards cannot roll back what serves; None if they can, or the base does."""
    stands = await gated(connection, name)
    if stands is None:
        return None
    version = stands.serving.version.version
    promoted = await promotion(connection, name, version)
    why = why_unwatched(stands, promoted)
    rule = rule_of(stands.serving.gate or {})
    if why is not None or not version or rule.mode == "gated":
        return why
    served = await terms(connection, name, version, rule.counted_at(stands.now))
    return why_not_in_line(served, version)


async def waiting_of(connection: AsyncConnection, name: str) -> tuple[int, str] | None:
    """Return the number of the candidate, and why it waits though its replay has ended, if so."""
    stands = await gated(connection, name)
    if stands is None or stands.candidate is None:
        return None
    number = stands.candidate.version.version
    why = await why_stays(connection, name, number)
    return None if why is None else (number, why)


async def trial_of(connection: AsyncConnection, name: str) -> tuple[int, Decision] | None:
    """Return the number of the version that is tried, and what it has come to; None: none is."""
    stands = await gated(connection, name)
    if stands is None or stands.canary is None:
        return None
    decision = await OnTrial(stands, stands.canary).decide(connection, stands.now)
    return stands.canary.version.version, decision
