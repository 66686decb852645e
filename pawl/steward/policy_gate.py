"""Judge the versions of one policy: what is to change in a look, within its transaction."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.steward.evidence import OnTrial, key_of, reads_until, rule_of
from pawl.steward.gate.records import MOST_CLIPPED, ArmFigures, Decision
from pawl.steward.gate.watch import Watched
from pawl.steward.metrics import (
    GATE_BOUND,
    GATE_CLIPPED,
    GATE_EPISODES,
    GATE_FAILED,
    GATE_FROZEN,
    GATE_WATCHED,
)
from pawl.steward.replay.replaying import Replays
from pawl.steward.replay.verdict import Replayed, evidence_of, replay_rule_of
from pawl.steward.rollback import Loaded, RollbackTarget, call_back, roll_back_to
from pawl.steward.watching import READ_AGAIN, Watching
from store.read.events import is_why_it_stays
from store.read.standing import Gated, Standing, gated, newest_promoted
from store.records import ARMS, Record
from store.version_queries import numbered_version
from store.version_states import (
    add_event,
    begin_canary,
    change_state,
    hold_gate,
    lock_policies,
    promote,
    reject,
    roll_back,
)
from store.versions import Actor, PolicyState, PolicyVersion
from trainer.metrics import VERSION

log = structlog.get_logger()

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


Judged = Literal["trial", "watch"]
REMEDY = (
    "they lie outside of gate.reward_range and count as its ends, so a version that is worse may"
    " look as good: set it to your rewards' lowest and highest, for the versions to come"
)


class Clipping:
    """Show it of the trial, or of the watch, of one policy."""

    def __init__(self, policy: str, judged: Judged) -> None:
        """Begin without having seen a reward."""
        self._policy = policy
        self._judged: Judged = judged
        self._has_warned = False

    def show(self, arms: Mapping[str, ArmFigures]) -> None:
        """Show the shares of arms; log once if one is too large, until none is any more."""
        shares = {arm: figures.clipped_share for arm, figures in arms.items()}
        for arm, share in shares.items():
            GATE_CLIPPED.labels(self._policy, self._judged, arm).set(share)
        many = {arm: f"{share:.0%}" for arm, share in shares.items() if share > MOST_CLIPPED}
        if many and not self._has_warned:
            log.warning(
                "rewards_clipped",
                policy=self._policy,
                judged=self._judged,
                shares=many,
                reason=REMEDY,
            )
        self._has_warned = bool(many)

    def hide(self) -> None:
        """Show nothing more: nothing is judged."""
        self._has_warned = False
        for arm in ARMS:
            GATE_CLIPPED.remove(self._policy, self._judged, arm)


class PolicyGate:
    """Judge the versions of one policy.

    Attributes:
        before: what is to be loaded, to serve again, before what serves can be rolled back; None
            if nothing waits for that since the last look.
    """

    def __init__(self, name: str, replays: Replays) -> None:
        """Begin without having seen an episode; `replays` are those of all policies."""
        self._name = name
        self._replays = replays
        self._trial: OnTrial | None = None
        self._watching = Watching(name)
        self._clipped_trial, self._clipped_watch = Clipping(name, "trial"), Clipping(name, "watch")
        self._why_unwatched: str | None = None
        self._failure: str | None = None
        self.before: RollbackTarget | None = None

    def failed(self, error: Exception | None) -> None:
        """Show whether the policy can be judged; log a failure once, however often it comes."""
        failure = None if error is None else repr(error)
        if error is not None and failure != self._failure:
            log.error("policy_not_judged", policy=self._name, exc_info=error)
        self._failure = failure
        GATE_FAILED.labels(self._name).set(error is not None)

    async def judge(self, connection: AsyncConnection, loaded: Loaded | None = None) -> Moved:
        """Make the changes that are due, in the caller's transaction, and return them.

        `loaded` is what came of loading what the last look wanted `before`, if it wanted that.
        There are none of a policy that is frozen, or that another steward judges now.
        """
        self.before = None
        if not await hold_gate(connection, self._name):
            return []
        stands = await gated(connection, self._name)
        if stands is None:
            return []
        GATE_FROZEN.labels(self._name).set(stands.frozen)
        VERSION.labels(self._name).set(await newest_promoted(connection, self._name))
        if stands.frozen:
            return []
        moved = await self._outdated(connection, stands)
        moved = moved or await self._watched(connection, stands, loaded)
        if moved or self.before is not None:
            return moved
        return await self._tried(connection, stands) or await self._begun(connection, stands)

    async def _outdated(self, connection: AsyncConnection, stands: Gated) -> Moved:
        """Take from the gate what is older than the version that serves."""
        serving, moved = stands.serving.version, Moved()
        why = f"{serving.served_name} serves, and is newer"
        ends: tuple[tuple[Standing | None, PolicyState], ...] = (
            (stands.canary, "published"),
            (stands.candidate, "rejected"),
        )
        for one, to in ends:
            if one is not None and one.version.version < serving.version:
                await change_state(connection, one.version, to, reason=why, actor=STEWARD)
                moved.append((one.version, to, why))
        return moved

    async def _watched(
        self, connection: AsyncConnection, stands: Gated, loaded: Loaded | None
    ) -> Moved:
        """Roll back what serves if it has fallen behind what it is compared with."""
        watched = await self._watching.look(connection, stands)
        self._show_watched(stands.serving.version, watched)
        if watched is None or not (watched.roll_back and await self._stands(connection, stands)):
            return []
        return await self._fall(connection, stands.serving, loaded, watched)

    async def _fall(
        self,
        connection: AsyncConnection,
        serving: Standing,
        loaded: Loaded | None,
        watched: Watched,
    ) -> Moved:
        """Roll back what serves, if what is to serve instead was loaded; else let it be loaded."""
        first: PolicyVersion | None = None
        if watched.since is not None:
            first = await numbered_version(connection, self._name, watched.since)
        before, why = await call_back(connection, serving.version, STEWARD, first)
        if loaded is None or loaded.version.version != before.version.version:
            self.before = before
            return [] if why is None else [(before.version, "published", why)]
        reason = watched.reason
        serves = await roll_back_to(
            connection,
            serving.version,
            loaded,
            reason=reason,
            actor=STEWARD,
            evidence={"watched": msgspec.to_builtins(watched)},
            first=first,
        )
        again = f"{serving.version.served_name} was rolled back"
        return [(serving.version, "rolled_back", reason), (serves, "serving", again)]

    async def _stands(self, connection: AsyncConnection, then: Gated) -> bool:
        """Return whether all stands as it did when the look began, and will until it ends.

        Reading episodes takes a while, in which an operator may have moved the traffic, or frozen
        the policy: what was found is then about what is no more.
        """
        await lock_policies(connection, [self._name])
        now = await gated(connection, self._name)
        return now is not None and msgspec.structs.replace(now, now=then.now) == then

    async def _tried(self, connection: AsyncConnection, stands: Gated) -> Moved:
        """Promote the canary, or roll it back, if its episodes suffice for that."""
        canary = stands.canary
        if canary is None:
            self._show(None)
            return []
        judged = await self._judged(connection, stands, canary)
        if judged is None:
            return []
        trial, decision = judged
        self._show(decision)
        if decision.kind == "wait":
            trial.is_second = False
            return []
        if not await self._stands(connection, stands):
            return []
        evidence = trial.evidence(decision)
        if decision.kind == "retire":
            why = decision.reason
            await roll_back(
                connection, canary.version, reason=why, actor=STEWARD, evidence=evidence
            )
            return [(canary.version, "rolled_back", why)]
        await promote(
            connection,
            self._name,
            canary.version.version,
            reason=decision.reason,
            actor=STEWARD,
            evidence=evidence,
        )
        return [(canary.version, "serving", decision.reason)]

    async def _judged(
        self, connection: AsyncConnection, stands: Gated, canary: Standing
    ) -> tuple[OnTrial, Decision] | None:
        """Return what a trial has come to; None while it is read on.

        What is to be done by it is found twice, by episodes that are read from the beginning.
        """
        until, key = reads_until(), key_of(stands.serving, canary)
        trial = self._trial
        if trial is None or trial.key != key or trial.is_old(stands.now - READ_AGAIN):
            trial = self._trial = OnTrial(stands, canary)
        if not await trial.read(connection, stands.now, until):
            return None
        decision = await trial.decide(connection, stands.now)
        if decision.kind == "wait" or trial.is_second:
            return trial, decision
        trial = self._trial = OnTrial(stands, canary, is_second=True)
        if not await trial.read(connection, stands.now, until):
            return None
        return trial, await trial.decide(connection, stands.now)

    async def _begun(self, connection: AsyncConnection, stands: Gated) -> Moved:
        """Let the candidate be tried, or reject it for its replay, if none is tried."""
        admitted = admission(stands, self._replays)
        if admitted is None or await is_told(connection, admitted):
            return []
        if not await self._stands(connection, stands):
            return []
        return await admit(connection, admitted)

    def _show_watched(self, serving: PolicyVersion, watched: Watched | None) -> None:
        """Show whether what serves is watched, and log once why it is not."""
        if watched is None:
            self._clipped_watch.hide()
        else:
            self._clipped_watch.show(watched.arms)
        why = self._watching.why_not
        if why is not None and why != self._why_unwatched:
            log.warning("nothing_watched", version=serving.served_name, reason=why)
        self._why_unwatched = why
        if serving.version:
            GATE_WATCHED.labels(self._name).set(why is None)
        else:
            GATE_WATCHED.remove(self._name)

    def _show(self, decision: Decision | None) -> None:
        """Show how far a trial is."""
        if decision is None:
            if self._trial is not None:
                self._hide()
            return
        for bound, value in (("lower", decision.lower), ("upper", decision.upper)):
            GATE_BOUND.labels(self._name, bound).set(value)
        for arm, figures in decision.arms.items():
            GATE_EPISODES.labels(self._name, arm).set(figures.episodes)
        self._clipped_trial.show(decision.arms)

    def _hide(self) -> None:
        self._trial = None
        self._clipped_trial.hide()
        for bound in ("lower", "upper"):
            GATE_BOUND.remove(self._name, bound)
        for arm in ARMS:
            GATE_EPISODES.remove(self._name, arm)

    def forget(self) -> None:
        """Show nothing more of the policy: it has no version with a gate any more."""
        self._hide()
        self._clipped_watch.hide()
        self._replays.forget(self._name)
        for gauge in (GATE_FROZEN, GATE_FAILED, GATE_WATCHED, VERSION):
            gauge.remove(self._name)
