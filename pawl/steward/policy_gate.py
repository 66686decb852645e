"""Judge the versions of one policy: what is to change in a look, within its transaction."""

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.steward.again import Before, Loaded, call_back, roll_back_to
from pawl.steward.candidates import STEWARD, Moved, admission, admit, is_told
from pawl.steward.clipping import Clipping
from pawl.steward.evidence import OnTrial, key_of
from pawl.steward.gate.records import Decision
from pawl.steward.gate.watch import Watched
from pawl.steward.looks import reads_until
from pawl.steward.metrics import (
    GATE_BOUND,
    GATE_EPISODES,
    GATE_FAILED,
    GATE_FROZEN,
    GATE_WATCHED,
)
from pawl.steward.replay.replays import Replays
from pawl.steward.watching import READ_AGAIN, Watching
from store.read.standing import Gated, Standing, gated, newest_promoted
from store.records import ARMS
from store.version_queries import numbered_version
from store.version_states import change_state, hold_gate, lock_policies, promote, roll_back
from store.versions import PolicyState, PolicyVersion
from trainer.metrics import VERSION

log = structlog.get_logger()


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
        self.before: Before | None = None

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
