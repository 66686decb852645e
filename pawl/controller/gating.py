"""Judge the versions of policies with a gate by what their episodes came to, and move the traffic.

A look is one transaction: what a decision rests on is read, and the states are changed with their
events, by one controller at a time. So a kill, or a database that goes away, leaves nothing half
done, and several controllers decide what one would. It needs no trainer, and a model server only to
load what serves again after a roll-back, and, between looks, to have a candidate answer recorded
calls.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.controller.evidence import OnTrial, key_of, one_look, reads_until, rule_of
from pawl.controller.gate.records import MOST_CLIPPED, ArmFigures, Decision
from pawl.controller.gate.replay import replay_rule_of
from pawl.controller.gate.watch import Watched
from pawl.controller.metrics import (
    GATE_BOUND,
    GATE_CLIPPED,
    GATE_EPISODES,
    GATE_FAILED,
    GATE_FROZEN,
    GATE_MOVES,
    GATE_WATCHED,
)
from pawl.controller.replays import Replays
from pawl.controller.rollback import (
    Loaded,
    RollbackTarget,
    call_back,
    load_again,
    make_room,
    roll_back_to,
)
from pawl.controller.watching import READ_AGAIN, Watching
from pawl.database import open_engine
from store.database import explain, is_no_records_fault, is_unavailable
from store.metrics import begin_at_zero
from store.read.gates import (
    Gated,
    Standing,
    gated,
    gated_policies,
    newest_promoted,
    unruled_policies,
)
from store.records import ARMS
from store.settings import StoreSettings
from store.version_queries import is_why_it_stays, numbered_version
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
from trainer.publishing.model_server import Replicas

log = structlog.get_logger()

CONTROLLER: Final[Actor] = "controller"
Moved = list[tuple[PolicyVersion, PolicyState, str]]


Judged = Literal["trial", "watch"]
# What a version may become by the gate.
MOVES: Final[tuple[PolicyState, ...]] = (
    *("canary", "serving", "published", "rolled_back", "rejected"),
)
REMEDY = (
    "they lie outside of gate.reward_range and count as its ends, so a version that is worse may"
    " look as good: set it to your rewards' lowest and highest, for the versions to come"
)


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
        # What is judged by many clipped rewards, and was warned of.
        self._clipped: set[Judged] = set()
        self._why_unwatched: str | None = None
        self._failure: str | None = None
        self.before: RollbackTarget | None = None
        begin_at_zero({GATE_MOVES: [[name], MOVES]})

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
        There are none of a policy that is frozen, or that another controller judges now.
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
                await change_state(connection, one.version, to, reason=why, actor=CONTROLLER)
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
        before, why = await call_back(connection, serving.version, CONTROLLER, first)
        if loaded is None or loaded.version.version != before.version.version:
            self.before = before
            return [] if why is None else [(before.version, "published", why)]
        reason = watched.reason
        serves = await roll_back_to(
            connection,
            serving.version,
            loaded,
            reason=reason,
            actor=CONTROLLER,
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
                connection, canary.version, reason=why, actor=CONTROLLER, evidence=evidence
            )
            return [(canary.version, "rolled_back", why)]
        await promote(
            connection,
            self._name,
            canary.version.version,
            reason=decision.reason,
            actor=CONTROLLER,
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
        """Let the candidate be tried, or reject it for its replay, if no other is tried.

        Raises:
            msgspec.ValidationError: the candidate's rule cannot be read.
        """
        candidate = stands.candidate
        if candidate is None or stands.canary is not None:
            self._replays.forget(self._name)
            return []
        version, replayed, evidence = candidate.version, None, None
        replay_rule = replay_rule_of(candidate.gate or {})
        if replay_rule.replay_states:
            replayed = self._replays.verdict(candidate, stands.serving, replay_rule, stands.now)
            if replayed is None:
                return []
            evidence = msgspec.to_builtins({"replay": replayed, "rule": replay_rule})
        waits = None if replayed is None else replayed.why_waits
        # Of several controllers each has its own reason, as servers may refuse each something else.
        is_known = waits is not None and await is_why_it_stays(
            connection, self._name, version.version, waits
        )
        if is_known or not await self._stands(connection, stands):
            return []
        if replayed is not None and replayed.why_not is not None:
            why = replayed.why_not
            await reject(connection, version, reason=why, actor=CONTROLLER, evidence=evidence or {})
            return [(version, "rejected", why)]
        if waits is None:
            return await self._try(connection, candidate, evidence)
        await add_event(
            connection,
            self._name,
            version.version,
            "candidate",
            before="candidate",
            reason=waits,
            actor=CONTROLLER,
            evidence=evidence,
        )
        return []

    async def _try(
        self, connection: AsyncConnection, candidate: Standing, evidence: Mapping[str, Any] | None
    ) -> Moved:
        """Give a candidate its share of the new episodes."""
        version = candidate.version
        rule = rule_of(candidate.gate or {})
        why = f"it gets {rule.canary_share:.0%} of the new episodes, to be compared"
        await begin_canary(
            connection,
            version,
            rule.canary_share,
            rule.base_share,
            reason=why,
            actor=CONTROLLER,
            evidence=evidence,
        )
        return [(version, "canary", why)]

    def _show_watched(self, serving: PolicyVersion, watched: Watched | None) -> None:
        """Show whether what serves is watched, and log once why it is not."""
        if watched is None:
            self._hide_clipped("watch")
        else:
            self._show_clipped("watch", watched.arms)
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
        self._show_clipped("trial", decision.arms)

    def _show_clipped(self, judged: Judged, arms: Mapping[str, ArmFigures]) -> None:
        """Show the arms' shares of clipped rewards; warn once while one of them is too large."""
        shares = {arm: figures.clipped_share for arm, figures in arms.items()}
        for arm, share in shares.items():
            GATE_CLIPPED.labels(self._name, judged, arm).set(share)
        large = {arm: f"{share:.0%}" for arm, share in shares.items() if share > MOST_CLIPPED}
        if not large:
            self._clipped.discard(judged)
        elif judged not in self._clipped:
            self._clipped.add(judged)
            log.warning(
                "rewards_clipped", policy=self._name, judged=judged, shares=large, reason=REMEDY
            )

    def _hide_clipped(self, judged: Judged) -> None:
        self._clipped.discard(judged)
        for arm in ARMS:
            GATE_CLIPPED.remove(self._name, judged, arm)

    def _hide(self) -> None:
        self._trial = None
        self._hide_clipped("trial")
        for bound in ("lower", "upper"):
            GATE_BOUND.remove(self._name, bound)
        for arm in ARMS:
            GATE_EPISODES.remove(self._name, arm)

    def forget(self) -> None:
        """Show nothing more of the policy: it has no version with a gate any more."""
        self._hide()
        self._hide_clipped("watch")
        self._replays.forget(self._name)
        for gauge in (GATE_FROZEN, GATE_FAILED, GATE_WATCHED, VERSION):
            gauge.remove(self._name)


class Gating:
    """Judge each policy with a gate, again and again."""

    def __init__(self, settings: StoreSettings, poll_s: float, replicas: Replicas) -> None:
        """Store where the database is, the pause between two looks, and the model servers."""
        self._settings = settings
        self._poll_s = poll_s
        self._replicas = replicas
        self._policies: dict[str, PolicyGate] = {}
        self.replays = Replays(replicas)
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
        """Log why no policy can be judged now, and not again until the reason is another."""
        is_away = is_no_records_fault(error)
        trouble = "gate_waits_for_database" if is_away else "gate_fails"
        if trouble != self._trouble:
            tell = log.warning if is_away else log.exception
            tell(trouble, reason=f"{type(error).__name__}: {explain(error)}")
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

    async def _judge(self, engine: AsyncEngine, policy: PolicyGate) -> None:
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
            await make_room(engine, self._replicas, policy.before.version, CONTROLLER)
            loaded = await load_again(self._replicas, policy.before)
            if loaded.why_not is not None:
                name = policy.before.version.served_name
                log.error("adapter_not_loaded", version=name, reason=loaded.why_not)
