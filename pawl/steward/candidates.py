"""Let a candidate be tried on a share of the new episodes, once it has answered recorded calls."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.steward.evidence import rule_of
from pawl.steward.replay.replays import Replays
from pawl.steward.replay.verdict import Replayed, evidence_of, replay_rule_of
from store.read.events import is_why_it_stays
from store.read.standing import Gated, Standing
from store.records import Record
from store.version_states import add_event, begin_canary, reject
from store.versions import Actor, PolicyState, PolicyVersion

STEWARD: Final[Actor] = "steward"
Moved = list[tuple[PolicyVersion, PolicyState, str]]


class Admission(Record, frozen=True, kw_only=True):
    """Say what is to be done about a candidate; `replayed` is what its replay came to, if any.

    `evidence` is that with the rule, as JSON.
    """

    candidate: Standing
    replayed: Replayed | None = None
    evidence: Mapping[str, Any] | None = None

    @property
    def why_waits(self) -> str | None:
        """Return why it waits on, though its replay has ended; None if it does not."""
        return None if self.replayed is None else self.replayed.why_waits


def admission(stands: Gated, replays: Replays) -> Admission | None:
    """Return what is to be done about a policy's candidate; None: nothing, it waits.

    It waits for the end of another's trial, and then of its replay. None as well if there is none.

    Raises:
        msgspec.ValidationError: the candidate's rule cannot be read.
    """
    candidate = stands.candidate
    if candidate is None or stands.canary is not None:
        replays.forget(stands.serving.version.name)
        return None
    rule = replay_rule_of(candidate.gate or {})
    if not rule.replay_states:
        return Admission(candidate=candidate)
    replayed = replays.verdict(candidate, stands.serving, rule, stands.now)
    if replayed is None:
        return None
    figures = evidence_of(replayed, rule)
    return Admission(candidate=candidate, replayed=replayed, evidence=figures)


async def is_told(connection: AsyncConnection, admitted: Admission) -> bool:
    """Return whether an event says already why a candidate waits on.

    Of several stewards each has its own reason, as servers may refuse each something else.
    """
    one, why = admitted.candidate.version, admitted.why_waits
    return why is not None and await is_why_it_stays(connection, one.name, one.version, why)


async def admit(connection: AsyncConnection, admitted: Admission) -> Moved:
    """Let a candidate be tried, reject it for its replay, or record why it waits on.

    That is done in the caller's transaction.

    Raises:
        StateChanged: it is no candidate any more.
    """
    version, replayed = admitted.candidate.version, admitted.replayed
    if replayed is not None and replayed.why_not is not None:
        evidence = admitted.evidence or {}
        await reject(connection, version, reason=replayed.why_not, actor=STEWARD, evidence=evidence)
        return [(version, "rejected", replayed.why_not)]
    if admitted.why_waits is not None:
        await _waits(connection, version, admitted.why_waits, admitted.evidence)
        return []
    rule = rule_of(admitted.candidate.gate or {})
    why = f"it gets {rule.canary_share:.0%} of the new episodes, to be compared"
    await begin_canary(
        connection,
        version,
        rule.canary_share,
        rule.base_share,
        reason=why,
        actor=STEWARD,
        evidence=admitted.evidence,
    )
    return [(version, "canary", why)]


async def _waits(
    connection: AsyncConnection,
    version: PolicyVersion,
    why: str,
    evidence: Mapping[str, Any] | None,
) -> None:
    await add_event(
        connection,
        version.name,
        version.version,
        "candidate",
        before="candidate",
        reason=why,
        actor=STEWARD,
        evidence=evidence,
    )
