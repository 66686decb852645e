"""Judge the versions of policies with a gate by what their episodes came to, and move the traffic.

A look is one transaction: what a decision rests on is read, and the states are changed with their
events, by one steward at a time. So a kill, or a database that goes away, leaves nothing half done,
and several stewards decide what one would. It needs no trainer, and a model server only to load
what serves again after a roll-back, and, between looks, to have a candidate answer recorded calls.
"""

import asyncio
from functools import partial

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.judging.answers import Judge
from pawl.stack.database import open_engine
from pawl.steward.again import Before, Loaded, call_back, load_again, roll_back_to
from pawl.steward.candidates import STEWARD, Moved, admission, admit
from pawl.steward.evidence import OnTrial, key_of
from pawl.steward.gate.records import Decision
from pawl.steward.gate.watch import Watched
from pawl.steward.looks import one_look
from pawl.steward.metrics import (
    GATE_BOUND,
    GATE_EPISODES,
    GATE_FAILED,
    GATE_FROZEN,
    GATE_MOVES,
    GATE_WATCHED,
)
from pawl.steward.replay.replays import Replays
from pawl.steward.watching import READ_AGAIN, Watching
from store.connection.availability import is_unavailable
from store.read.standing import (
    Gated,
    Standing,
    gated,
    gated_policies,
    newest_promoted,
    unruled_policies,
)
from store.records import ARMS
from store.settings import StoreSettings
from store.updates.gating import hold_gate, roll_back
from store.updates.policies import numbered_version, promote
from store.updates.states import change_state, lock_policies
from store.versions import PolicyState, PolicyVersion
from trainer.metrics import VERSION
from trainer.publishing.replicas import Replicas

log = structlog.get_logger()


class Gating:
    """Judge each policy with a gate, again and again."""

    def __init__(
        self,
        settings: StoreSettings,
        poll_s: float,
        replicas: Replicas,
        judge: Judge | None = None,
    ) -> None:
        """Store where the database is, the pause between two looks, and the model servers.

        `judge` scores what candidates answer in their replays, if there is one.
        """
        self._settings = settings
        self._poll_s = poll_s
        self._replicas = replicas
        self._policies: dict[str, PolicyGate] = {}
        self.replays = Replays(replicas, judge)
        # What keeps all policies from being judged, and which of them was looked at then.
        self._trouble: str | None = None
        self._put_off: str | None = None
        self._unruled: set[str] = set()

    async def follow(self) -> None:
        """Look again and again; never return. `Known` tells whether the database is there."""
        while True:
            try:
                async with (
                    open_engine(self._settings) as engine,
                    self.replays.going_on(engine, self._poll_s),
                ):
                    while True:
                        await self.look(engine)
                        self._trouble = None
                        await asyncio.sleep(self._poll_s)
            except Exception as error:
                # What is known of the episodes stays, and the next look goes on from there.
                self._note(error)
            await asyncio.sleep(self._poll_s)

    def _note(self, error: Exception) -> None:
        """Log why no policy is judged, once for as long as it stays so."""
        is_away = is_unavailable(error)
        trouble = "gate_waits_for_database" if is_away else "gate_fails"
        if trouble != self._trouble:
            tell = log.warning if is_away else log.exception
            tell(trouble, reason=f"{type(error).__name__}: {error}"[:200])
        self._trouble = trouble

    async def look(self, engine: AsyncEngine) -> None:
        """Judge every policy once; what fails in one hinders no other.

        One that was looked at as the database went away comes last: it may be its own look that the
        database ends, as one that is too long for it.

        Raises:
            Exception: the database is away.
        """
        async with engine.connect() as connection:
            names = await gated_policies(connection)
            unruled = await unruled_policies(connection) - set(names)
        for name in self._policies.keys() - set(names):
            self._policies.pop(name).forget()
        self._show_unruled(unruled)
        for name in sorted(names, key=lambda one: one == self._put_off):
            policy = self._policies.setdefault(name, PolicyGate(name, self.replays))
            self._put_off = name
            try:
                await self._judge(engine, policy)
            except Exception as error:
                if is_unavailable(error):
                    raise
                policy.failed(error)
                continue
            policy.failed(None)
        self._put_off = None

    def _show_unruled(self, names: set[str]) -> None:
        """Show the policies that nothing is watched of, as there is no rule to judge them by."""
        for name in self._unruled - names:
            if name not in self._policies:
                GATE_WATCHED.remove(name)
        for name in names:
            GATE_WATCHED.labels(name).set(0)
        self._unruled = names

    async def _judge(self, engine: AsyncEngine, policy: "PolicyGate") -> None:
        """Judge one policy; if what is to serve again must be loaded, load it, and judge again."""
        loaded: Loaded | None = None
        for _ in range(2):
            moved = await one_look(engine, partial(policy.judge, loaded=loaded))
            # Only now is it so.
            for version, to, reason in moved:
                GATE_MOVES.labels(version.name, to).inc()
                log.info("gate_moved", version=version.served_name, to=to, reason=reason)
                if to == "serving" and version.state == "canary":
                    log.info("version_promoted", version=version.served_name)
            if policy.before is None:
                return
            loaded = await _loaded(self._replicas, policy.before)


async def _loaded(replicas: Replicas, before: Before) -> Loaded:
    """Load what is to serve again, and log why it could not be loaded."""
    loaded = await load_again(replicas, before)
    if loaded.why_not is not None:
        name = before.version.served_name
        log.error("adapter_not_loaded", version=name, reason=loaded.why_not)
    return loaded


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
        found = await self._watching.look(connection, stands)
        self._show_watched(stands.serving.version)
        if found is None or not (found.roll_back and await self._stands(connection, stands)):
            return []
        return await self._fall(connection, stands.serving, loaded, found)

    async def _fall(
        self,
        connection: AsyncConnection,
        serving: Standing,
        loaded: Loaded | None,
        found: Watched,
    ) -> Moved:
        """Roll back what serves, if what is to serve instead was loaded; else let it be loaded."""
        first: PolicyVersion | None = None
        if found.since is not None:
            first = await numbered_version(connection, self._name, found.since)
        before, why = await call_back(connection, serving.version, STEWARD, first)
        if loaded is None or loaded.version.version != before.version.version:
            self.before = before
            return [] if why is None else [(before.version, "published", why)]
        reason = found.reason
        serves = await roll_back_to(
            connection,
            serving.version,
            loaded,
            reason=reason,
            actor=STEWARD,
            evidence={"watched": msgspec.to_builtins(found)},
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
        key = key_of(stands.serving, canary)
        trial = self._trial
        if trial is None or trial.key != key or trial.is_old(stands.now - READ_AGAIN):
            trial = self._trial = OnTrial(stands, canary)
        decision = await trial.decide(connection, stands.now)
        if decision.kind != "wait" and not trial.is_second:
            trial = self._trial = OnTrial(stands, canary, is_second=True)
            decision = await trial.decide(connection, stands.now)
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

    async def _begun(self, connection: AsyncConnection, stands: Gated) -> Moved:
        """Let the candidate be tried, or reject it for its replay, if none is tried."""
        admitted = admission(stands, self._replays)
        if admitted is None or not await self._stands(connection, stands):
            return []
        return await admit(connection, admitted)

    def _show_watched(self, serving: PolicyVersion) -> None:
        """Show whether what serves is watched, and log once why it is not."""
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

    def _hide(self) -> None:
        self._trial = None
        for bound in ("lower", "upper"):
            GATE_BOUND.remove(self._name, bound)
        for arm in ARMS:
            GATE_EPISODES.remove(self._name, arm)

    def forget(self) -> None:
        """Show nothing more of the policy: it has no version with a gate any more."""
        self._hide()
        self._replays.forget(self._name)
        for gauge in (GATE_FROZEN, GATE_FAILED, GATE_WATCHED, VERSION):
            gauge.remove(self._name)
