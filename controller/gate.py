"""Decide about the versions of each policy by their episodes' results, and move the traffic.

A canary is rolled back once it is shown to be worse than the serving version, in reward or in a
guard (failed, malformed, slow); the serving version, once it is shown to be worse than its control.
`controller.comparison` has the test. If rewards fall below their own past, training is held,
and nothing is rolled back.

A look is one transaction: it reads the evidence, locks the policy, and if the policy has not
changed meanwhile, changes states and adds their events. So a kill or a lost database leaves nothing
half done, and several controllers decide as a single one would. The gate needs neither a trainer
nor a model server: every version that may get the traffic is loaded already.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import msgspec
import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controller.comparison import MOST_SHARE, Comparison, canary_share
from controller.evaluating import Evaluations
from controller.evidence import ArmVersions, Evidence
from controller.metrics import (
    GATE_DIFFERENCE_BOUND,
    GATE_EPISODES,
    GATE_FAILED,
    GATE_FROZEN,
    GATE_MOVES,
    GATE_WATCHED,
)
from store.metrics import begin_at_zero
from store.read.gates import (
    GatedPolicy,
    VersionInRole,
    episodes_per_hour,
    gated_policies,
    last_traffic_gain,
    next_control,
    read_gated_policy,
    served_since,
)
from store.records import Arm
from store.version_queries import why_state_stayed
from store.version_states import (
    Why,
    add_event,
    await_approval,
    begin_canary,
    change_state,
    hold_training,
    lock_policies,
    move_control,
    promote,
    resume_training,
    roll_back,
)
from store.versions import Actor, PolicyState, PolicyVersion
from trainer.recipes.recipe import PublishOptions

log = structlog.get_logger()

CONTROLLER: Final[Actor] = "controller"
# The states that the controller may give to a version.
MOVES: Final[tuple[PolicyState, ...]] = (
    *("canary", "serving", "retired", "rolled_back", "rejected"),
)
# A longer look is cancelled and retried; the episodes that it read are kept.
LOOK_LIMIT_S: Final = 60.0
# The bounds, which only people read, are computed again after this growth in the number of blocks.
RENEWED: Final = 1.05
WAITS_FOR_APPROVAL: Final = "it waits for approval (`pawl policies promote`): "
UNDECIDED: Final = "undecided"
NOTHING_SHOWN: Final = "nothing was shown in time"
PASSED_PROBE: Final = "it passed its probe"

# The keys of a stored rule that are read; a trainer of another release may have stored others.
RULE_KEYS: Final = PublishOptions.model_fields.keys()
# The figures of a comparison that are shown.
BOUNDS: Final = ("lower", "upper")
ARMS: Final = ("new", "old")

Compared = Literal["trial", "watch"]


class Move(NamedTuple):
    """A version's new state and the reason for it; in force once the look is committed."""

    version: PolicyVersion
    to: PolicyState
    reason: str


# Called with the policy locked, if it has not changed since it was read. Returns None if no version
# gets another state.
Act = Callable[[], Awaitable[list[Move] | None]]


class PolicyGate:
    """Decide about the versions of one policy."""

    def __init__(self, name: str, evaluations: Evaluations) -> None:
        """Start without evidence; all policies share `evaluations`."""
        self._name = name
        self._evaluations = evaluations
        self._evidence: dict[Compared, Evidence] = {}
        self._failure: str | None = None
        begin_at_zero({GATE_MOVES: [[name], MOVES]})

    async def judge(self, engine: AsyncEngine) -> None:
        """Make the policy's due moves in one transaction; log them, and a lasting failure once."""
        error: Exception | None = None
        moves: list[Move] = []
        try:
            async with asyncio.timeout(LOOK_LIMIT_S), engine.begin() as connection:
                moves = await self._make_due_moves(connection)
            error = self._evaluations.errors.get(self._name)
        except TimeoutError:
            error = TimeoutError(
                f"judging took longer than {LOOK_LIMIT_S:g} s and was cancelled; the next look goes"
                " on from the episodes read so far"
            )
        except Exception as failed:
            error = failed
        failure = None if error is None else repr(error)
        if error is not None and failure != self._failure:
            log.error("policy_not_judged", policy=self._name, exc_info=error)
        self._failure = failure
        GATE_FAILED.labels(self._name).set(error is not None)
        for version, to, reason in moves:
            GATE_MOVES.labels(version.name, to).inc()
            log.info("gate_moved", version=version.served_name, to=to, reason=reason)

    async def _make_due_moves(self, connection: AsyncConnection) -> list[Move]:
        """Change the versions' states as is due, and return the moves; none if it is frozen."""
        policy = await read_gated_policy(connection, self._name)
        if policy is None:
            return []
        GATE_FROZEN.labels(self._name).set(policy.frozen)
        if policy.frozen:
            return []
        act = (
            await self._watch(connection, policy)
            or await self._judge_trial(connection, policy)
            or await self._judge_candidate(connection, policy)
        )
        if act is None:
            return []
        # An operator, or another controller, may have moved the traffic in the meantime.
        await lock_policies(connection, [self._name])
        now = await read_gated_policy(connection, self._name)
        is_same = now is not None and msgspec.structs.replace(now, now=policy.now) == policy
        return (await act() if is_same else None) or []

    async def _watch(self, connection: AsyncConnection, policy: GatedPolicy) -> Act | None:
        """Compare the serving arm with its control, and return the action that is due, or None.

        All versions that served since the control are one arm. In the modes with a trial, the
        control is the version that the serving one was tried against.
        """
        serving, control = policy.serving, policy.control
        rule, number = _rule_of(serving), serving.version.version
        if control is None or not number:
            # A version that serves again after a roll-back was already compared with its control.
            gain = await last_traffic_gain(connection, self._name, number)
            is_back = gain.from_state == "retired" and gain.actor == CONTROLLER
            GATE_WATCHED.labels(self._name).set(is_back or not (number and rule.control_share))
            self._remove_gauges("watch")
            why = _because("training goes on: there is no control to show why rewards fell")
            go_on = partial(resume_training, connection, self._name, **why)
            return go_on if policy.is_held else None
        GATE_WATCHED.labels(self._name).set(1)
        old = control.version.version
        served = await served_since(connection, self._name, control.since)
        # The rule's shares, not the current ones: for some time the control's share is larger.
        shares = 1 - rule.control_share, rule.control_share
        evidence = self._evidence_of("watch", "serving", rule, shares, control.since, control)
        arms: ArmVersions = {"serving": served, "control": range(old + 1)}
        is_read = await evidence.catch_up(connection, arms, policy.now)
        comparison = evidence.comparison
        if comparison.verdict is not None:
            return partial(self._roll_back, connection, serving, _why(comparison, rule))
        if is_read:
            self._show_gauges("watch", comparison)
            return await self._act_on_watch(connection, policy, served, evidence)
        return None

    async def _act_on_watch(
        self, connection: AsyncConnection, policy: GatedPolicy, served: set[int], evidence: Evidence
    ) -> Act | None:
        """Return the action due after reading all evidence without a verdict, or None."""
        serving, control, comparison = policy.serving, policy.control, evidence.comparison
        rule = _rule_of(serving)
        why = partial(_why, comparison, rule)
        assert control is not None
        if comparison.fall is not None or policy.is_held:
            return self._hold_or_resume(connection, policy, comparison, why)
        if comparison.trade is not None and not evidence.is_loss_reported:
            evidence.is_loss_reported = True
            return partial(self._record_finding, connection, serving, why(comparison.trade))
        # After a promotion without a verdict, the control has the trial's share, until there is
        # enough evidence.
        gain = await last_traffic_gain(connection, self._name, serving.version.version)
        is_undecided = gain.verdict == UNDECIDED and _share_of(control) > rule.control_share
        if is_undecided and comparison.scores_lower:
            lower = why(f"{serving.version.served_name} scores lower so far")
            return partial(self._return_traffic, connection, serving, control, lower)
        version: int | None = None
        if is_undecided:
            version = control.version.version if comparison.has_trial_information else None
        elif comparison.next_control is not None:
            # Episodes that hang, or failed without a reward, count only after this delay.
            before = policy.now - timedelta(seconds=rule.reward_delay_s)
            newest = comparison.next_control
            version = await next_control(connection, self._name, newest, served, before)
        if version is None:
            return None
        no_worse = why("the versions that served since the last control do no worse")
        share = rule.control_share
        return partial(move_control, connection, self._name, version, share, **no_worse)

    def _hold_or_resume(
        self,
        connection: AsyncConnection,
        policy: GatedPolicy,
        comparison: Comparison,
        because: Callable[[str], Why],
    ) -> Act | None:
        """Return the action that holds training, or that resumes it if the control may move."""
        serving = policy.serving
        if not policy.is_held:
            fell = f"rewards fell by {comparison.fall:.0%} of their range while it serves"
            why = because(
                f"{fell}: training waits until it is shown to do no worse than its control"
            )
            share = max(_share_of(policy.control), MOST_SHARE)
            log.error("training_held", version=serving.version.served_name, reason=why["reason"])
            return partial(hold_training, connection, serving.version, share, **why)
        why = because("it does no worse than its control: training goes on")
        go_on = partial(resume_training, connection, self._name, **why)
        return go_on if comparison.may_move_control else None

    async def _return_traffic(
        self, connection: AsyncConnection, serving: VersionInRole, control: VersionInRole, why: Why
    ) -> list[Move]:
        """Let the control serve again; the version without proof is retired, not rolled back."""
        version = control.version
        await promote(connection, self._name, version.version, **why)
        taken = f"{version.served_name} took the traffic"
        return [
            Move(serving.version, "retired", taken),
            Move(version, "serving", why["reason"]),
        ]

    async def _judge_trial(self, connection: AsyncConnection, policy: GatedPolicy) -> Act | None:
        """Compare the canary with the serving version; return the end of the trial, or None.

        A trial ends with a verdict or when its time is over. While there is no evidence at all, it
        goes on after its time, unless a newer version waits.
        """
        serving, canary = policy.serving, policy.canary
        if canary is None:
            self._remove_gauges("trial")
            return None
        rule = _rule_of(canary)
        share = canary.version.share or 0.0
        shares = share, 1 - share - _share_of(policy.control)
        since = max(canary.since, serving.since)
        evidence = self._evidence_of("trial", "canary", rule, shares, since, serving, canary)
        given: ArmVersions = {
            "canary": {canary.version.version},
            "serving": {serving.version.version},
        }
        if not await evidence.catch_up(connection, given, policy.now):
            return None
        comparison = evidence.comparison
        self._show_gauges("trial", comparison)
        is_over = policy.now - since >= timedelta(hours=rule.decide_within_h)
        may_end = comparison.difference is not None or policy.candidate is not None
        if comparison.verdict is None and not (is_over and may_end):
            return None
        return partial(self._end, connection, canary, rule, comparison)

    async def _judge_candidate(
        self, connection: AsyncConnection, policy: GatedPolicy
    ) -> Act | None:
        """Return the action due on the candidate, or None: a trial, or the end of its evaluation.

        If approval is needed in the mode without a trial, the candidate waits for it.
        """
        candidate = policy.candidate
        if candidate is None or policy.canary is not None:
            await self._evaluations.forget(self._name)
            return None
        rule = _rule_of(candidate)
        if candidate.version.awaits_approval:
            return None
        if rule.mode == "canary":
            return partial(self._begin_trial, connection, policy, candidate, rule)
        if rule.mode == "evaluated":
            result = await self._evaluations.outcome(candidate, policy.serving, rule)
            end = partial(self._end, connection, candidate, rule)
            return None if result is None else partial(end, result)
        # In the mode without a trial `Publishing` promotes, unless approval is needed.
        why = _because(WAITS_FOR_APPROVAL + PASSED_PROBE, {})
        waits = partial(await_approval, connection, candidate.version, **why)
        return waits if rule.approve else None

    async def _begin_trial(
        self,
        connection: AsyncConnection,
        policy: GatedPolicy,
        candidate: VersionInRole,
        rule: PublishOptions,
    ) -> list[Move]:
        """Make the candidate a canary, with the share of new episodes for a decision in time."""
        per_hour = await episodes_per_hour(connection, self._name)
        share = canary_share(per_hour, rule, _share_of(policy.control))
        why = f"it gets {share:.0%} of the new episodes ({per_hour:.3g} an hour), to be compared"
        await begin_canary(connection, candidate.version, share, **_because(why))
        return [Move(candidate.version, "canary", why)]

    async def _end(
        self,
        connection: AsyncConnection,
        tried: VersionInRole,
        rule: PublishOptions,
        comparison: Comparison,
    ) -> list[Move]:
        """Roll back, retire or promote a version, as its finished comparison says.

        It may wait for approval instead of being promoted.
        """
        version, why, verdict = tried.version, _why(comparison, rule), comparison.verdict
        if verdict is not None and verdict.kind == "worse":
            return await self._roll_back(connection, tried, why)
        if version.awaits_approval:
            return []
        if verdict is None and (
            rule.undecided == "keep" or comparison.difference is None or comparison.points_to_harm
        ):
            await change_state(connection, version, "retired", **why)
            return [Move(version, "retired", why["reason"])]
        if rule.approve:
            waits = _because(WAITS_FOR_APPROVAL + why["reason"], why["evidence"])
            await await_approval(connection, version, **waits)
            return []
        # After a promotion without a verdict the control, if any, gets at least the trial's share.
        share = None
        if verdict is None and rule.control_share and version.share is not None:
            share = max(version.share, rule.control_share)
        await promote(connection, self._name, version.version, control_share=share, **why)
        return [Move(version, "serving", why["reason"])]

    async def _roll_back(
        self, connection: AsyncConnection, fallen: VersionInRole, why: Why
    ) -> list[Move]:
        """Roll back a version and all trained from it; after a serving one, another one serves.

        A version that never had traffic is rejected instead.
        """
        version = fallen.version
        serves = await roll_back(connection, version, **why)
        to: PolicyState = "rejected" if version.state == "loaded" else "rolled_back"
        moves = [Move(version, to, why["reason"])]
        if serves is not None:
            moves.append(Move(serves, "serving", f"{version.served_name} was rolled back"))
        return moves

    async def _record_finding(
        self, connection: AsyncConnection, serving: VersionInRole, why: Why
    ) -> None:
        """Record a finding about the serving version once; it goes on serving."""
        version = serving.version
        if await why_state_stayed(connection, self._name, version.version) != why["reason"]:
            await add_event(connection, self._name, version.version, version.state, **why)

    def _evidence_of(
        self,
        compared: Compared,
        new: Arm,
        rule: PublishOptions,
        shares: tuple[float, float],
        since: datetime,
        *versions: VersionInRole,
    ) -> Evidence:
        """Return the evidence so far, or begin anew if the versions or the rule have changed.

        Episodes that begin from `since` on count. `new` is the arm of the new version, `shares` are
        the new and the old arm's shares of new episodes, and `versions` are those compared.
        """
        key = rule, *((one.version.version, one.since) for one in versions)
        evidence = self._evidence.get(compared)
        if evidence is None or evidence.key != key:
            watches = compared == "watch"
            comparison = Comparison(rule, new_share=shares[0], old_share=shares[1], watches=watches)
            evidence = Evidence(self._name, rule, new, since, comparison, key=key)
            self._evidence[compared] = evidence
        return evidence

    def _show_gauges(self, compared: Compared, comparison: Comparison) -> None:
        """Set the gauges of a comparison."""
        figures = comparison.figures(RENEWED)
        for bound in BOUNDS:
            GATE_DIFFERENCE_BOUND.labels(self._name, compared, bound).set(getattr(figures, bound))
        for arm in ARMS:
            GATE_EPISODES.labels(self._name, compared, arm).set(getattr(figures, arm).episodes)

    def _remove_gauges(self, compared: Compared) -> None:
        if self._evidence.pop(compared, None) is not None:
            for bound in BOUNDS:
                GATE_DIFFERENCE_BOUND.remove(self._name, compared, bound)
            for arm in ARMS:
                GATE_EPISODES.remove(self._name, compared, arm)

    async def forget(self) -> None:
        """Drop the gauges and evaluation of a policy that has no version to judge any more."""
        self._remove_gauges("watch")
        self._remove_gauges("trial")
        await self._evaluations.forget(self._name)
        for gauge in (GATE_FROZEN, GATE_FAILED, GATE_WATCHED):
            gauge.remove(self._name)


def _rule_of(version: VersionInRole) -> PublishOptions:
    """Return the rule that a version was written with.

    Raises:
        ValueError: the stored rule is invalid.
    """
    stored = version.version.gate or {}
    try:
        return PublishOptions(**{key: stored[key] for key in stored.keys() & RULE_KEYS})
    except ValidationError as error:
        raise ValueError(
            f"the stored [publish] of {version.version.served_name} is invalid: {error}"
        ) from error


def _share_of(control: VersionInRole | None) -> float:
    return 0.0 if control is None else control.version.share or 0.0


def _because(reason: str, evidence: Mapping[str, Any] | None = None) -> Why:
    return {"reason": reason, "actor": CONTROLLER, "evidence": evidence}


def _why(comparison: Comparison, rule: PublishOptions, reason: str | None = None) -> Why:
    """Return the reason of a decision, and the evidence that is stored with it."""
    verdict, difference = comparison.verdict, comparison.difference
    kind = UNDECIDED if verdict is None else verdict.kind
    if verdict is not None:
        shown = verdict.reason
    elif difference is None:
        shown = f"{NOTHING_SHOWN}: nothing was scored"
    else:
        points = "and points to harm" if comparison.points_to_harm else "which is no sign of harm"
        shown = f"{NOTHING_SHOWN}: the difference so far is {difference:+.3g}, {points}"
    figures = msgspec.to_builtins(comparison.figures())
    return _because(
        reason or shown, {"verdict": kind, "figures": figures, "rule": rule.model_dump()}
    )


class Gate:
    """Judge each policy that has versions to decide about."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        self._policies: dict[str, PolicyGate] = {}

    async def look(self, engine: AsyncEngine) -> None:
        """Judge every policy once; a failure of one does not affect the others."""
        async with engine.connect() as connection:
            names = await gated_policies(connection)
        for name in self._policies.keys() - set(names):
            await self._policies.pop(name).forget()
        for name in names:
            if name not in self._policies:
                self._policies[name] = PolicyGate(name, self._evaluations)
            await self._policies[name].judge(engine)
