"""Decide about the versions of each policy by what their episodes came to, and move the traffic.

A look is one transaction: what a decision rests on is read, and the states are changed with their
events, by one controller at a time. So a kill, or a database that goes away, leaves nothing half
done, and several controllers decide what one would. It needs neither a trainer nor a model server:
whatever may get the traffic is loaded already.
"""

import asyncio
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.controller.comparison import Comparison, Rule, canary_share
from pawl.controller.evaluating import Evaluations
from pawl.controller.evidence import Compared, Evidence
from pawl.controller.metrics import (
    GATE_BOUND,
    GATE_EPISODES,
    GATE_FAILED,
    GATE_FROZEN,
    GATE_MOVES,
    GATE_WATCHED,
)
from pawl.database import open_engine
from store.database import explain, is_no_records_fault, is_unavailable
from store.metrics import begin_at_zero
from store.read.gates import (
    Gated,
    Standing,
    episodes_per_hour,
    gated,
    gated_policies,
    is_proven,
    newest_promoted,
    served_since,
)
from store.records import Arm
from store.settings import StoreSettings
from store.version_queries import why_stays
from store.version_states import (
    add_event,
    begin_canary,
    change_state,
    hold_gate,
    lock_policies,
    promote,
    roll_back,
    set_control_share,
)
from store.versions import Actor, PolicyState, PolicyVersion
from trainer.metrics import VERSION

log = structlog.get_logger()

CONTROLLER: Final[Actor] = "controller"
# What a version may become by the controller.
MOVES: Final[tuple[PolicyState, ...]] = (
    *("canary", "serving", "retired", "rolled_back", "rejected"),
)
# A look that takes longer is given up, and begun again: episodes that were read count.
LOOK_S: Final = 60.0
# The bounds, which are for people, are taken anew once there are this many times the blocks.
RENEWED: Final = 1.05
WAITS: Final = "it waits for approval (`pawl policies promote`): "
NOTHING_SHOWN: Final = "nothing was shown in time"
PASSED: Final = "it passed its probe"


class LookTooLong(Exception):
    """Say that a look was given up, as it took too long; the database had let it begin."""


class Move(NamedTuple):
    """Say what a version became, and why; it holds once the look is committed."""

    version: PolicyVersion
    to: PolicyState
    reason: str


class PolicyGate:
    """Decide about the versions of one policy."""

    def __init__(self, name: str, evaluations: Evaluations) -> None:
        """Begin without having seen an episode; `evaluations` are those of all policies."""
        self._name = name
        self._evaluations = evaluations
        self._evidence: dict[Compared, Evidence] = {}
        # The versions that the watch is about; more may serve while it goes on.
        self._watched: set[int] = set()
        self._failure: str | None = None
        begin_at_zero({GATE_MOVES: [[name], MOVES]})

    def failed(self, error: Exception | None) -> None:
        """Show whether the policy can be judged; log a failure once, however often it comes."""
        failure = None if error is None else repr(error)
        if error is not None and failure != self._failure:
            log.error("policy_not_judged", policy=self._name, exc_info=error)
        self._failure = failure
        GATE_FAILED.labels(self._name).set(error is not None)

    async def look(self, connection: AsyncConnection) -> list[Move]:
        """Make the changes that are due, in the caller's transaction, and return them.

        There are none of a policy that is frozen, or that another controller judges now.

        Raises:
            msgspec.ValidationError: the rule of a version cannot be read.
        """
        if not await hold_gate(connection, self._name):
            return []
        stands = await gated(connection, self._name)
        if stands is None:
            return []
        GATE_FROZEN.labels(self._name).set(stands.frozen)
        VERSION.labels(self._name).set(await newest_promoted(connection, self._name))
        if stands.frozen:
            return []
        return (
            await self._overtaken(connection, stands)
            or await self._watch(connection, stands)
            or await self._try(connection, stands)
            or await self._begin(connection, stands)
        )

    async def _overtaken(self, connection: AsyncConnection, stands: Gated) -> list[Move]:
        """Retire a canary or a candidate that is older than what serves: somebody moved that."""
        serving, moves = stands.serving.version, []
        why = f"{serving.served_name} serves, and is newer"
        for older in (stands.canary, stands.candidate):
            if older is not None and older.version.version < serving.version:
                await change_state(
                    connection, older.version, "retired", reason=why, actor=CONTROLLER
                )
                moves.append(Move(older.version, "retired", why))
        return moves

    # What serves against its control

    async def _watch(self, connection: AsyncConnection, stands: Gated) -> list[Move]:
        """Roll back what serves if it has fallen behind its control; or note that it is proven."""
        serving, control = stands.serving, stands.control
        is_watched = control is not None and serving.version.version > 0
        # Where nobody wants a control, nobody misses it.
        is_wanted = serving.version.version > 0 and _rule_of(serving).control_share > 0
        GATE_WATCHED.labels(self._name).set(is_watched or not is_wanted)
        if control is None or not is_watched:
            self._hide("watch")
            return []
        rule = _rule_of(serving)
        key = rule, *_key_of(control)
        served = await served_since(connection, self._name, control.since)
        evidence = self._evidence.get("watch")
        if evidence is None or evidence.key != key:
            self._watched = served
            evidence = self._compare("watch", rule, key, stands)
        self._watched |= served
        if await evidence.catch_up(connection, stands.now):
            self._show("watch", evidence.comparison)
        verdict = evidence.comparison.verdict
        if verdict is None or (
            verdict.kind == "better" and not await self._is_news(connection, evidence, serving)
        ):
            return []
        if not await self._stands(connection, stands):
            return []
        why = _why(evidence.comparison, rule)
        if verdict.kind == "worse":
            return await self._fall(connection, serving, why)
        await self._prove(connection, serving.version, rule, why)
        return []

    async def _is_news(
        self, connection: AsyncConnection, evidence: Evidence, serving: Standing
    ) -> bool:
        """Return whether what serves is to be noted as proven, which it is not yet.

        Its own episodes have to speak for it, and not only those of versions before it: it will
        itself be the control of what serves after it.
        """
        number = serving.version.version
        if not (evidence.newest == number and evidence.comparison.is_borne_out):
            return False
        return not await is_proven(connection, self._name, number)

    async def _prove(
        self,
        connection: AsyncConnection,
        serving: PolicyVersion,
        rule: Rule,
        why: tuple[str, Mapping[str, Any]],
    ) -> None:
        """Write down that what serves is no worse than its control, whose share gets smaller."""
        reason, evidence = why
        await add_event(
            connection,
            self._name,
            serving.version,
            "serving",
            before="serving",
            reason=reason,
            actor=CONTROLLER,
            evidence=evidence,
        )
        await set_control_share(connection, self._name, rule.control_share)

    async def _fall(
        self, connection: AsyncConnection, version: Standing, why: tuple[str, Mapping[str, Any]]
    ) -> list[Move]:
        """Roll a version back, with what was trained on it; what it was compared with serves."""
        reason, evidence = why
        serves = await roll_back(
            connection, version.version, reason=reason, actor=CONTROLLER, evidence=evidence
        )
        to: PolicyState = "rejected" if version.version.state == "loaded" else "rolled_back"
        moves = [Move(version.version, to, reason)]
        if serves is not None:
            again = f"{version.version.served_name} was rolled back"
            moves.append(Move(serves, "serving", again))
        return moves

    # A canary against what serves

    async def _try(self, connection: AsyncConnection, stands: Gated) -> list[Move]:
        """Promote the canary, or end its trial, if its episodes suffice, or its time is over.

        What is to be done is found twice, the second time by episodes that are read from the
        beginning: a record may be stored late, as the database was away.
        """
        canary = stands.canary
        if canary is None:
            self._hide("trial")
            return []
        rule = _rule_of(canary)
        key = rule, *_key_of(stands.serving, canary)
        evidence = self._evidence.get("trial")
        if evidence is None or evidence.key != key:
            evidence = self._compare("trial", rule, key, stands)
        is_over = stands.now - canary.since >= timedelta(hours=rule.decide_within_h)
        is_decided = await self._is_decided(connection, evidence, stands, is_over=is_over)
        if is_decided and not evidence.confirms:
            evidence = self._compare("trial", rule, key, stands, confirms=True)
            is_decided = await self._is_decided(connection, evidence, stands, is_over=is_over)
        if not (is_decided and await self._stands(connection, stands)):
            return []
        return await self._end(connection, canary, rule, evidence.comparison)

    async def _is_decided(
        self, connection: AsyncConnection, evidence: Evidence, stands: Gated, *, is_over: bool
    ) -> bool:
        """Return whether there is a verdict, or no time is left.

        It goes on past its time while nothing is known at all, unless a newer version waits. There
        is nothing to decide while episodes are still to be read.
        """
        if not await evidence.catch_up(connection, stands.now):
            return False
        comparison = evidence.comparison
        self._show("trial", comparison)
        may_end = comparison.difference is not None or stands.candidate is not None
        is_decided = comparison.verdict is not None or (is_over and may_end)
        evidence.confirms &= is_decided
        return is_decided

    async def _end(
        self, connection: AsyncConnection, version: Standing, rule: Rule, comparison: Comparison
    ) -> list[Move]:
        """Do what the comparison of a version with what serves, which has ended, came to."""
        why = _why(comparison, rule)
        reason, evidence = why
        verdict = comparison.verdict
        if verdict is not None and verdict.kind == "worse":
            return await self._fall(connection, version, why)
        if await self._waits(connection, version.version):
            return []
        if verdict is None and (
            rule.undecided == "keep" or comparison.difference is None or comparison.points_to_harm
        ):
            await change_state(
                connection,
                version.version,
                "retired",
                reason=reason,
                actor=CONTROLLER,
                evidence=evidence,
            )
            return [Move(version.version, "retired", reason)]
        if rule.approve:
            shown = NOTHING_SHOWN if verdict is None else verdict.reason
            await self._wait(connection, version.version, shown, evidence)
            return []
        # What is not proven is watched, if at all, with as many episodes as it was tried with.
        is_watched_more = verdict is None and rule.control_share > 0
        await promote(
            connection,
            self._name,
            version.version.version,
            reason=reason,
            actor=CONTROLLER,
            evidence=evidence,
            control_share=version.version.share if is_watched_more else None,
        )
        return [Move(version.version, "serving", reason)]

    async def _waits(self, connection: AsyncConnection, version: PolicyVersion) -> bool:
        """Return whether a version waits for a person, who was shown the evidence."""
        reason = await why_stays(connection, self._name, version.version)
        return reason is not None and reason.startswith(WAITS)

    async def _wait(
        self,
        connection: AsyncConnection,
        version: PolicyVersion,
        shown: str,
        evidence: Mapping[str, Any],
    ) -> None:
        """Write down that a version waits for a person, with the evidence."""
        await add_event(
            connection,
            self._name,
            version.version,
            version.state,
            before=version.state,
            reason=WAITS + shown,
            actor=CONTROLLER,
            evidence=evidence,
        )

    # A candidate

    async def _begin(self, connection: AsyncConnection, stands: Gated) -> list[Move]:
        """Let a loaded version be tried, or do what its evaluation came to."""
        candidate = stands.candidate
        if candidate is None or stands.canary is not None:
            self._evaluations.forget(self._name)
            return []
        rule = _rule_of(candidate)
        if rule.approve and await self._waits(connection, candidate.version):
            return []
        comparison: Comparison | None = None
        if rule.mode == "evaluated":
            comparison = self._evaluations.outcome(candidate, stands.serving, rule)
        is_due = {
            "immediate": rule.approve,
            "evaluated": comparison is not None,
            "canary": True,
        }[rule.mode]
        if not (is_due and await self._stands(connection, stands)):
            return []
        if comparison is not None:
            return await self._end(connection, candidate, rule, comparison)
        if rule.mode == "immediate":
            await self._wait(connection, candidate.version, PASSED, {})
            return []
        return await self._begin_trial(connection, stands, candidate.version, rule)

    async def _begin_trial(
        self, connection: AsyncConnection, stands: Gated, version: PolicyVersion, rule: Rule
    ) -> list[Move]:
        """Give a version as large a share of the new episodes as decides about it in time."""
        taken = 0.0 if stands.control is None else stands.control.version.share or 0.0
        per_hour = await episodes_per_hour(connection, self._name)
        share = canary_share(per_hour, rule, taken)
        why = f"it gets {share:.0%} of the new episodes ({per_hour:.3g} an hour), to be compared"
        await begin_canary(connection, version, share, reason=why, actor=CONTROLLER)
        return [Move(version, "canary", why)]

    # All of them

    async def _stands(self, connection: AsyncConnection, then: Gated) -> bool:
        """Return whether all stands as it did when the look began, and will until it ends.

        Reading episodes takes a while, in which an operator may have moved the traffic, or frozen
        the policy: what was found is then about what is no more.
        """
        await lock_policies(connection, [self._name])
        now = await gated(connection, self._name)
        return now is not None and msgspec.structs.replace(now, now=then.now) == then

    def _compare(
        self,
        compared: Compared,
        rule: Rule,
        key: object,
        stands: Gated,
        *,
        confirms: bool = False,
    ) -> Evidence:
        """Begin to compare the two versions of a trial, or what served with its control."""
        serving, canary, control = stands.serving, stands.canary, stands.control
        taken = (control and control.version.share) or 0.0
        new: tuple[Arm, Collection[int]]
        old: tuple[Arm, Collection[int]]
        if compared == "watch":
            assert control is not None
            new, old = ("serving", self._watched), ("control", {control.version.version})
            # By the rule, as the control may have had a larger share before what serves was proven.
            shares, since = (1 - rule.control_share, rule.control_share), control.since
        else:
            assert canary is not None
            new = "canary", {canary.version.version}
            old = "serving", {serving.version.version}
            share = canary.version.share or 0.0
            shares, since = (share, 1 - share - taken), max(canary.since, serving.since)
        comparison = Comparison(
            rule, new_share=shares[0], old_share=shares[1], watches=compared == "watch"
        )
        self._evidence[compared] = Evidence(
            self._name, rule, new, old, since, comparison, key=key, confirms=confirms
        )
        return self._evidence[compared]

    def _show(self, compared: Compared, comparison: Comparison) -> None:
        """Show how far a comparison is."""
        figures = comparison.figures(RENEWED)
        for bound, value in (("lower", figures.lower), ("upper", figures.upper)):
            GATE_BOUND.labels(self._name, compared, bound).set(value)
        for version, arm in (("new", figures.new), ("old", figures.old)):
            GATE_EPISODES.labels(self._name, compared, version).set(arm.episodes)

    def _hide(self, compared: Compared) -> None:
        if self._evidence.pop(compared, None) is None:
            return
        for bound in ("lower", "upper"):
            GATE_BOUND.remove(self._name, compared, bound)
        for version in ("new", "old"):
            GATE_EPISODES.remove(self._name, compared, version)

    def forget(self) -> None:
        """Show nothing more of the policy: it has no version to be judged any more."""
        self._hide("watch")
        self._hide("trial")
        self._evaluations.forget(self._name)
        for gauge in (GATE_FROZEN, GATE_FAILED, GATE_WATCHED, VERSION):
            gauge.remove(self._name)


def _rule_of(version: Standing) -> Rule:
    """Return the rule that a version was loaded with.

    Raises:
        msgspec.ValidationError: it is none.
    """
    try:
        return msgspec.convert(dict(version.gate or {}), Rule)
    except msgspec.ValidationError as error:
        named = version.version.served_name
        raise msgspec.ValidationError(f"the [publish] that {named} has: {error}") from error


def _key_of(*parts: Standing) -> tuple[object, ...]:
    return tuple((one.version.version, one.since) for one in parts)


def _why(comparison: Comparison, rule: Rule) -> tuple[str, dict[str, Any]]:
    """Return the reason of a decision, and the evidence that is stored with it."""
    verdict, difference = comparison.verdict, comparison.difference
    kind = "undecided" if verdict is None else verdict.kind
    if verdict is not None:
        reason = verdict.reason
    elif difference is None:
        reason = f"{NOTHING_SHOWN}: nothing was scored"
    else:
        points = "and points to harm" if comparison.points_to_harm else "which is no sign of harm"
        reason = f"{NOTHING_SHOWN}: the difference so far is {difference:+.3g}, {points}"
    found = {"verdict": kind, "figures": comparison.figures(), "rule": rule}
    return reason, msgspec.to_builtins(found)


class Deciding:
    """Look at each policy with versions to decide about, again and again."""

    def __init__(self, settings: StoreSettings, poll_s: float, evaluations: Evaluations) -> None:
        """Store where the database is, the pause between two looks, and the evaluations."""
        self._settings = settings
        self._poll_s = poll_s
        self._evaluations = evaluations
        self._policies: dict[str, PolicyGate] = {}
        # What keeps all policies from being judged, and which of them was looked at then.
        self._trouble: str | None = None
        self._put_off: str | None = None

    async def follow(self) -> None:
        """Look again and again; never return."""
        while True:
            try:
                async with open_engine(self._settings) as engine:
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
        for name in self._policies.keys() - set(names):
            self._policies.pop(name).forget()
        for name in sorted(names, key=lambda one: one == self._put_off):
            policy = self._policies.setdefault(name, PolicyGate(name, self._evaluations))
            self._put_off = name
            try:
                moves = await one_look(engine, policy)
            except Exception as error:
                if is_unavailable(error):
                    raise
                policy.failed(error)
                continue
            policy.failed(self._evaluations.errors.get(name))
            for version, to, reason in moves:
                GATE_MOVES.labels(version.name, to).inc()
                log.info("gate_moved", version=version.served_name, to=to, reason=reason)
                if to == "serving" and version.state in ("canary", "loaded"):
                    log.info("version_promoted", version=version.served_name)
        self._put_off = None


async def one_look(engine: AsyncEngine, policy: PolicyGate) -> list[Move]:
    """Look at a policy in one transaction, and return what it moved.

    Raises:
        LookTooLong: it is not done in time; the next goes on with the episodes that it had read.
        TimeoutError: the database did not even let it begin.
    """
    has_begun = False
    try:
        async with asyncio.timeout(LOOK_S), engine.begin() as connection:
            has_begun = True
            return await policy.look(connection)
    except TimeoutError as error:
        if not has_begun:
            raise
        raise LookTooLong(
            f"a look was given up after {LOOK_S:g} s, though the database had let it begin: what it"
            " had read counts, and the next goes on from there; if this stays so, the database is"
            " too slow for as many episodes"
        ) from error
