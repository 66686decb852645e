"""Plan an update: from a claim to its rows, outcomes and metrics (pure)."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final
from uuid import UUID

from msgspec import convert, to_builtins

from store.records import Group, Record
from store.updates.claims import Claim, Outcome
from store.updates.ready import ClaimRule
from trainer.batches.rows import Row, imitated_rows, training_rows
from trainer.credit.advantages import AIR_SPREAD
from trainer.credit.assign import Credited, TransitionCredit, assign_credit
from trainer.credit.baselines import BASELINES
from trainer.credit.moving import NO_MOVING_BASELINES, MovingBaselines
from trainer.recipes.recipe import Recipe
from trainer.updates.imitable import with_imitable
from trainer.updates.recomputed import without_versions
from trainer.updates.staleness import FAR, OFF_POLICY
from trainer.updates.unreplayed import UNREPLAYED, without_calls

# The versions that could not compute the log-probabilities of what they had sampled, and why; an
# update's metrics have it if there are any.
LOST: Final = "lost_versions"
# How many times `claim.groups` an update takes that had to wait for an adapter slot.
PACED: Final = 4
# Seconds without activity until an unscored episode that failed takes `credit.failed_reward`.
FAILED_AFTER_S: Final = 60.0
NO_VERSION: Final[Mapping[int, str]] = {}
NO_CALL: Final[Mapping[str, str]] = {}
NO_EPISODE: Final[Mapping[UUID, float]] = {}


class Plan(Record, frozen=True, kw_only=True):
    """Hold an update's credited transitions, its training rows, and each episode's outcome.

    `step_share` (0 to 1) is the share of a whole update's step that this one takes. `baselines` are
    the moving baselines that this update leaves to the next, as JSON, or None if the recipe uses
    none.
    """

    credited: tuple[TransitionCredit, ...]
    rows: tuple[Row, ...]
    outcomes: tuple[Outcome, ...]
    metrics: dict[str, Any]
    step_share: float
    baselines: dict[str, Any] | None


def claim_rule(recipe: Recipe, policy: str) -> ClaimRule:
    """Return the store's claim rule for a recipe and a policy."""
    rule = recipe.claim
    return ClaimRule(
        policy=policy,
        group_size=rule.group_size,
        groups=rule.groups,
        smallest_group=rule.smallest_group,
        max_age_s=rule.max_age_s,
        max_staleness=rule.max_staleness,
        failed_after_s=None if recipe.credit.failed_reward is None else FAILED_AFTER_S,
        call_rewards_after_s=rule.call_rewards_after_s if recipe.credit.pays_single_calls else None,
        # What single calls were given is not compared in the store.
        needs_spread=BASELINES[recipe.credit.baseline].needs_group
        and not recipe.credit.pays_single_calls,
        failed_reward=recipe.credit.failed_reward,
        most_groups=PACED * rule.groups,
        least_reward=_least_reward(recipe),
    )


def _least_reward(recipe: Recipe) -> float | None:
    """Return the reward that an update waits for, if it waits for one that the store knows."""
    if recipe.kept is None or recipe.credit.pays_single_calls:
        return None
    return recipe.kept.min_reward


def plan_update(
    claim: Claim,
    recipe: Recipe,
    lost: Mapping[int, str] = NO_VERSION,
    unreplayed: Mapping[str, str] = NO_CALL,
    far: Mapping[UUID, float] = NO_EPISODE,
) -> Plan:
    """Assign credit to a claim and derive rows, outcomes and metrics.

    The result is the same for a claim that was consumed long ago, unless feedback was added since.
    `lost` says why, by version, for those that can no longer compute missing log-probabilities,
    `unreplayed` why, by call id, for calls whose grammar cannot be replayed. Episodes that are too
    `far` off the policy, with their effective sample sizes, count in the baseline of the others and
    are not trained.
    """
    claim = without_calls(without_versions(claim, lost), unreplayed)
    if recipe.kept is not None:
        claim = with_imitable(claim)
    credited = _credited(claim, recipe, far)
    make_rows = training_rows if recipe.kept is None else imitated_rows
    rows = make_rows(credited.transitions)
    outcomes = _outcomes(claim, credited.transitions)
    signal = _signal_groups(claim, credited, outcomes, recipe)
    step_share = min(1.0, signal / recipe.claim.groups)
    return Plan(
        credited=credited.transitions,
        rows=tuple(rows),
        outcomes=outcomes,
        metrics={
            **_metrics(claim, credited, rows, outcomes),
            **_left_out(lost, unreplayed, far),
            "signal_groups": signal,
            "step_share": step_share,
        },
        step_share=step_share,
        baselines=_baselines(credited, recipe),
    )


def _credited(claim: Claim, recipe: Recipe, far: Mapping[UUID, float]) -> Credited:
    before = (
        NO_MOVING_BASELINES
        if claim.baselines is None
        else convert(claim.baselines, MovingBaselines)
    )
    return assign_credit(
        claim.groups,
        recipe.credit,
        policy=claim.policy,
        oldest_version=claim.oldest_version,
        baselines=before,
        withheld=dict.fromkeys(far, OFF_POLICY),
        kept=recipe.kept,
        reward=recipe.reward_rule,
    )


def _baselines(credited: Credited, recipe: Recipe) -> dict[str, Any] | None:
    """Return the moving baselines for the next update, as `Plan.baselines`."""
    is_carried = BASELINES[recipe.credit.baseline].needs_moving_averages
    return to_builtins(credited.baselines) if is_carried else None


def _outcomes(claim: Claim, credited: Sequence[TransitionCredit]) -> tuple[Outcome, ...]:
    trained = {credit.episode_id for credit in credited if credit.reason is None}
    # The reason of a trainable call explains why its episode is not trained; that of a call
    # which is untrainable by itself does not.
    reasons = {credit.episode_id: credit.reason for credit in credited}
    reasons |= {credit.episode_id: credit.reason for credit in credited if credit.call.trainable}
    return tuple(
        Outcome(
            episode_id=episode.id,
            trained=episode.id in trained,
            reason=None
            if episode.id in trained
            else reasons.get(episode.id) or "no_trainable_call",
        )
        for group in claim.groups
        for episode in group.episodes
    )


def _signal_groups(
    claim: Claim, credited: Credited, outcomes: Sequence[Outcome], recipe: Recipe
) -> float:
    """Return how many groups have an episode that is trained; in groups of one each is its own.

    A group of which nothing but AIR differs counts for what AIR weighs without any spread: else
    what is left once a policy has learned its tasks would move it by whole steps.
    """
    trained = {outcome.episode_id for outcome in outcomes if outcome.trained}
    if recipe.claim.group_size == 1:
        return len(trained)
    groups = [group for group in claim.groups if any(one.id in trained for one in group.episodes)]
    if recipe.kept is not None:
        return len(groups)
    of_air = min(1.0, recipe.credit.air_lambda / AIR_SPREAD)
    return sum(1.0 if _finals_differ(group, credited) else of_air for group in groups)


def _finals_differ(group: Group, credited: Credited) -> bool:
    """Return whether the group's final rewards differ, or are compared with earlier ones."""
    returns = [credited.returns.get(one.id) for one in group.episodes]
    finals = {one.r_final for one in returns if one is not None and one.r_final is not None}
    return bool(group.earlier) or len(finals) > 1


def _metrics(
    claim: Claim,
    credited: Credited,
    rows: Sequence[Row],
    outcomes: Sequence[Outcome],
) -> dict[str, Any]:
    """Return an update's figures, JSON-ready.

    Means are over episodes, but `staleness_mean` is over rows.
    """
    returns = credited.returns.values()
    dropped: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.reason is not None:
            dropped[outcome.reason] = dropped.get(outcome.reason, 0) + 1
    return {
        "groups": len(claim.groups),
        "episodes": len(outcomes),
        "earlier_members": sum(len(group.earlier) for group in claim.groups),
        "trained_episodes": sum(outcome.trained for outcome in outcomes),
        "dropped": dropped,
        "reward_mean": _mean([mean_return.r_final for mean_return in returns]),
        "total_mean": _mean([mean_return.r_total for mean_return in returns]),
        "air_mean": _mean([mean_return.r_air for mean_return in returns]),
        "staleness_mean": _mean([claim.parent_version - row.version for row in rows]),
        "tool_events": sum(len(credit.call.tool_events) for credit in credited.transitions),
    }


def _left_out(
    lost: Mapping[int, str], unreplayed: Mapping[str, str], far: Mapping[UUID, float]
) -> dict[str, Any]:
    by_version = {str(version): reason for version, reason in lost.items()}
    by_episode = {str(episode): share for episode, share in far.items()}
    left_out = {LOST: by_version, UNREPLAYED: dict(unreplayed), FAR: by_episode}
    return {name: reasons for name, reasons in left_out.items() if reasons}


def lost_in(metrics: Mapping[str, Any]) -> dict[int, str]:
    """Return the lost versions that an update recorded in its metrics."""
    return {int(version): reason for version, reason in metrics.get(LOST, {}).items()}


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None
