"""Plan an update: from a claim to its rows, outcomes and metrics (pure)."""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from math import exp, fsum, isfinite, log, sqrt
from statistics import fmean, pstdev
from typing import Any, Final
from uuid import UUID

import msgspec

from store.claims import Claim, Outcome
from store.records import SIDE, Record, TransitionRow
from store.tenants import bare, task_family
from store.values.grammars import GRAMMAR
from trainer.batches import Row, RowKey, correction_rows, training_rows
from trainer.credit.advantages import AIR_SPREAD
from trainer.credit.assign import TransitionCredit, UpdateCredit, assign_credit
from trainer.credit.corrections import correction_of, corrections_of
from trainer.credit.moving import MovingBaselines
from trainer.recipes.recipe import Recipe

# Why a call is not trained: the files of its version are gone, or belong to another base model.
VERSION_GONE: Final = "version_gone"
OTHER_BASE: Final = "other_base"
# Why an episode is not trained: the policy has moved too far away from it.
OFF_POLICY: Final = "off_policy"
# Reasons of calls that can be imitated, but not trained with ratios: their ids are exact, but
# decoding was greedy, or followed a grammar that the request does not state. The reason
# `reshaped_distribution` is not included: settings such as a thinking budget insert tokens that
# neither policy nor agent chose.
IMITABLE: Final = frozenset({"greedy", "constrained_sampling"})
# An update's metrics list at most this many task families.
MOST_SHOWN_FAMILIES: Final = 12


class LeftOut(Record, frozen=True, kw_only=True):
    """Calls, episodes and corrections of a claim that its update cannot train on, with reasons.

    Attributes:
        lost_versions: by version number, why a version can no longer compute the log-probabilities
            that the server did not give.
        unreplayed_calls: by call id, why a call's grammar cannot be replayed.
        off_policy_episodes: by episode id, the effective sample size of an episode that is too far
            off the policy.
        refused_corrections: by call id, why a correction cannot be trained (`refused_corrections`,
            `reply_ids`).
    """

    lost_versions: Mapping[int, str] = {}
    unreplayed_calls: Mapping[str, str] = {}
    off_policy_episodes: Mapping[UUID, float] = {}
    refused_corrections: Mapping[str, str] = {}

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> "LeftOut":
        """Restore the value from the metrics that an update recorded (`metrics`)."""
        names = cls.__struct_fields__
        recorded = {name: metrics[name] for name in names if name in metrics}
        return msgspec.convert(recorded, cls, strict=False)

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the non-empty fields as metrics of the update, JSON-ready."""
        every = msgspec.to_builtins(self, str_keys=True)
        return {name: reasons for name, reasons in every.items() if reasons}


NOTHING_LEFT_OUT: Final = LeftOut()
NO_REPLIES: Final[Mapping[str, Sequence[int]]] = {}


class Plan(Record, frozen=True, kw_only=True):
    """An update's credited transitions, its training rows, and each episode's outcome.

    `step_share` (0 to 1) scales the learning rate: it is the square root of the number of episodes
    with a signal over that of a full update, because the noise of a mean falls with the root of the
    number. `baselines` are the moving baselines for the next update, JSON-ready, or None if the
    recipe uses none.
    """

    credited: tuple[TransitionCredit, ...]
    rows: tuple[Row, ...]
    outcomes: tuple[Outcome, ...]
    metrics: dict[str, Any]
    step_share: float
    baselines: dict[str, Any] | None


def plan_update(
    claim: Claim,
    recipe: Recipe,
    left_out: LeftOut = NOTHING_LEFT_OUT,
    replies: Mapping[str, Sequence[int]] = NO_REPLIES,
) -> Plan:
    """Assign credit to a claim and derive rows, outcomes and metrics.

    `replies` has the token ids of corrections by call id; a correction without them gets no row.
    Episodes that are too far off the policy count in the baseline of the others and are not
    trained. A claim that was consumed long ago gives the same result again, unless feedback was
    added since.
    """
    claim = _without_left_out(claim, left_out)
    if recipe.imitation_rule is not None:
        claim = _with_imitable(claim)
    credited = assign_credit(
        claim.groups,
        recipe.credit,
        policy=claim.policy,
        oldest_version=claim.oldest_version,
        baselines=msgspec.convert(claim.baselines or {}, MovingBaselines),
        withheld=dict.fromkeys(left_out.off_policy_episodes, OFF_POLICY),
        kept=recipe.imitation_rule,
        taught=recipe.teacher is not None,
        reward=recipe.reward_rule,
        reward_range=recipe.reward_range,
        trust=claim.trust,
    )
    trust = {bare(name): share for name, share in claim.trust.items()}
    refused = left_out.refused_corrections
    corrected = {call.id for call, _ in corrected_calls(claim) if str(call.id) not in refused}
    transitions = with_corrections(credited.transitions, corrected)
    credited = msgspec.structs.replace(credited, transitions=tuple(transitions))
    rows = training_rows(credited.transitions, imitated=recipe.imitation_rule is not None)
    outcomes = _outcomes(claim, credited.transitions)
    signal = _signal_episodes(claim, credited, outcomes, recipe)
    full_size = recipe.claim.groups * recipe.claim.group_size
    step_share = sqrt(min(1.0, signal / full_size))
    return Plan(
        credited=credited.transitions,
        rows=(*rows, *correction_rows(credited.transitions, replies)),
        outcomes=outcomes,
        metrics={
            **_metrics(claim, credited, rows, outcomes),
            **left_out.metrics,
            **({"trust": trust} if trust else {}),
            "corrections": sum(credit.correction > 0 for credit in credited.transitions),
            "corrections_refused": dict(Counter(left_out.refused_corrections.values())),
            "signal_episodes": signal,
            "step_share": step_share,
        },
        step_share=step_share,
        baselines=msgspec.to_builtins(credited.baselines)
        if recipe.credit.compares_episodes
        else None,
    )


def taught_plan(plan: Plan, teacher: Mapping[RowKey, Sequence[float]]) -> Plan:
    """Return the plan with a teacher's advantages for each token, and `teacher_kl` as a metric.

    `teacher` has the teacher's log-probabilities (S,) of each row's sampled tokens. A token's
    advantage is log teacher − log sampled. The mean of these estimates −KL(policy ‖ teacher) in
    nats a token. The advantage of a token does not include that of later tokens (as in "On-Policy
    Distillation", Thinking Machines, 2025; unlike MiniLLM, arXiv:2306.08543).
    """
    rows, advantages = list[Row](), list[float]()
    for row in plan.rows:
        if row.is_correction:
            rows.append(row)
            continue
        pairs = zip(teacher[row.key], row.sampled_logprobs, strict=True)
        of_row = tuple(wanted - sampled for wanted, sampled in pairs)
        rows.append(msgspec.structs.replace(row, token_advantages=of_row))
        advantages += of_row
    metrics = plan.metrics | {"teacher_kl": -fsum(advantages) / len(advantages)}
    return msgspec.structs.replace(plan, rows=tuple(rows), metrics=metrics)


def _outcomes(claim: Claim, credited: Sequence[TransitionCredit]) -> tuple[Outcome, ...]:
    trained = {one.episode_id for one in credited if one.reason is None or one.correction}
    # An episode's reason is that of a trainable call if there is one, else of another call, but
    # never of a side call.
    reasons = {one.episode_id: one.reason for one in credited if one.reason != SIDE}
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


def _signal_episodes(
    claim: Claim, credited: UpdateCredit, outcomes: Sequence[Outcome], recipe: Recipe
) -> float:
    """Return the sum of the signals, 0 to 1 each, of the trained episodes.

    - An episode with a correction has 1; so has every episode if the baseline compares none.
    - An episode of a group with equal final rewards has its absolute advantage, at most 1.
    - An episode whose final reward equals its baseline has what AIR weighs without a spread.
    - Any other episode has 1.

    So the weak signal that learned tasks still give does not move the policy by whole steps. With
    imitation of groups, each group with a trained episode counts as `group_size` episodes.
    """
    trained = {outcome.episode_id for outcome in outcomes if outcome.trained}
    if recipe.imitation_rule is not None and recipe.claim.group_size > 1:
        have_trained = [
            any(episode.id in trained for episode in group.episodes) for group in claim.groups
        ]
        return recipe.claim.group_size * sum(have_trained)
    if not recipe.credit.compares_episodes:
        return len(trained)
    signal = dict.fromkeys(trained, 0.0)
    of_air = min(1.0, recipe.credit.air_lambda / AIR_SPREAD)
    for credit in credited.transitions:
        compared = credit.comparison
        if credit.episode_id in trained and compared is not None:
            signal_of_call = 1.0 if compared.final != 0.0 else of_air * compared.air_weight
            if compared.is_alike:
                signal_of_call = min(1.0, abs(compared.value))
            signal[credit.episode_id] = max(signal[credit.episode_id], signal_of_call)
        if credit.correction:
            signal[credit.episode_id] = 1.0
    return fsum(signal.values())


def _metrics(
    claim: Claim, credited: UpdateCredit, rows: Sequence[Row], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """Return an update's figures, JSON-ready.

    Means are over episodes, except `staleness_mean`, which is over rows.
    """
    returns = credited.returns.values()
    finals = [mean.r_final for mean in returns if mean.r_final is not None]
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
        "reward_mean": _mean(finals),
        "reward_std": pstdev(finals) if finals else None,
        "families": _families(claim, credited),
        "air_mean": _mean([mean.r_air for mean in returns]),
        "staleness_mean": _mean([claim.parent_version - row.version for row in rows]),
        "tool_events": sum(len(credit.call.tool_events) for credit in credited.transitions),
    }


def _families(claim: Claim, credited: UpdateCredit) -> dict[str, dict[str, float]]:
    """Return the mean reward and the number of episodes of the largest task families."""
    rewards: dict[str, list[float]] = {}
    for group in claim.groups:
        returns = (credited.returns[one.id].r_final for one in group.episodes)
        family_rewards = rewards.setdefault(task_family(bare(group.task or "")), [])
        family_rewards += [reward for reward in returns if reward is not None]
    largest = sorted(filter(rewards.get, rewards), key=lambda family: -len(rewards[family]))[
        :MOST_SHOWN_FAMILIES
    ]
    return {
        family: {"reward": fmean(rewards[family]), "episodes": len(rewards[family])}
        for family in largest
    }


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _without_left_out(claim: Claim, left_out: LeftOut) -> Claim:
    """Return the claim with the calls that cannot be computed marked as not trainable."""

    def change(call: TransitionRow) -> TransitionRow:
        reason = None
        if _may_be_trained(call, claim) and not call.tokens.sampled_logprobs:
            reason = left_out.lost_versions.get(call.policy_version or 0)
        reason = left_out.unreplayed_calls.get(str(call.id), reason)
        if reason is None:
            return call
        return msgspec.structs.replace(call, trainable=False, reason=reason)

    return _with_calls(claim, change) if left_out != NOTHING_LEFT_OUT else claim


def _with_imitable(claim: Claim) -> Claim:
    """Return the claim with its policy's imitable calls (`IMITABLE`) marked as trainable."""

    def change(call: TransitionRow) -> TransitionRow:
        # Calls of an outside model or a fixed policy have no version.
        is_own = call.policy == claim.policy and call.policy_version is not None
        has_ids = bool(call.tokens.prompt_ids and call.tokens.sampled_ids)
        if call.reason in IMITABLE and is_own and has_ids:
            return msgspec.structs.replace(call, trainable=True, reason=None)
        return call

    return _with_calls(claim, change)


def _with_calls(claim: Claim, change: Callable[[TransitionRow], TransitionRow]) -> Claim:
    """Return the claim with `change` applied to each call of its episodes."""
    replace = msgspec.structs.replace
    groups = (
        replace(
            group,
            episodes=tuple(
                replace(episode, calls=tuple(map(change, episode.calls)))
                for episode in group.episodes
            ),
        )
        for group in claim.groups
    )
    return replace(claim, groups=tuple(groups))


# A correction is trained on the call's recorded prompt. It is refused here if the prompt's ids are
# unknown or another policy's, and by the learner if the corrected reply cannot be turned into token
# ids (`trainer.learners.corrections`).


def corrected_calls(claim: Claim) -> Iterator[tuple[TransitionRow, str]]:
    """Yield each call of a claim that has a correction, with the text of the correction."""
    for group in claim.groups:
        for episode in group.episodes:
            texts = corrections_of(episode.feedback, [call.feedback for call in episode.calls])
            pairs = zip(episode.calls, texts, strict=True)
            yield from ((call, text) for call, text in pairs if text is not None)


def refused_corrections(claim: Claim, recipe: Recipe) -> dict[str, str]:
    """Return, by call id, why corrections cannot be trained whatever their text.

    A correction of an episode with several calls is listed by the episode's id.
    """
    refused = {
        str(episode.id): "several_calls"
        for group in claim.groups
        for episode in group.episodes
        if len(episode.calls) > 1 and correction_of(episode.feedback) is not None
    }
    for call, _ in corrected_calls(claim):
        if recipe.learner == "ppo":
            refused[str(call.id)] = "ppo"
        elif call.policy != claim.policy or call.policy_version is None:
            refused[str(call.id)] = "other_policy"
        elif call.reason is not None and call.reason not in IMITABLE:
            refused[str(call.id)] = call.reason
    return refused


def with_corrections(
    credited: Sequence[TransitionCredit], corrected: Container[UUID]
) -> list[TransitionCredit]:
    """Return the credit of an update with its corrections' shares of the loss; 1 in sum.

    `corrected` are the ids of the calls with a correction. The corrections of one episode together
    get as much weight as the average trained episode, in equal parts.
    """
    of_episodes = Counter(one.episode_id for one in credited if one.call.id in corrected)
    if not of_episodes:
        return list(credited)
    trained = len({one.episode_id for one in credited if one.weight})
    each = 1.0 / (trained + len(of_episodes))
    return [
        msgspec.structs.replace(
            one,
            weight=one.weight * trained * each,
            correction=each / of_episodes[one.episode_id] if one.call.id in corrected else 0.0,
        )
        for one in credited
    ]


# The server gave some calls exact ids but no log-probabilities. The version that sampled them is
# immutable, so it computes the missing values when the update begins: such rows are `recomputed`.


def versions_to_ask(claim: Claim) -> set[int]:
    """Return the versions that sampled the claim's trainable calls without log-probabilities."""
    calls = _trainable_calls(claim)
    return {call.policy_version or 0 for call in calls if not call.tokens.sampled_logprobs}


def _trainable_calls(claim: Claim) -> Iterator[TransitionRow]:
    for group in claim.groups:
        for episode in group.episodes:
            yield from (call for call in episode.calls if _may_be_trained(call, claim))


def _may_be_trained(call: TransitionRow, claim: Claim) -> bool:
    return call.trainable and call.policy == claim.policy


def rows_to_compute(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the rows that have no log-probabilities, by the version that sampled them.

    The newest version comes first, because the learner usually has it loaded.
    """
    waiting = [row for row in rows if not row.sampled_logprobs and not row.is_correction]
    versions = sorted({row.version for row in waiting}, reverse=True)
    return {version: [row for row in waiting if row.version == version] for version in versions}


def calls_with_grammar(claim: Claim) -> list[TransitionRow]:
    """Return the trainable calls of a claim that were sampled under a grammar."""
    return [call for call in _trainable_calls(claim) if GRAMMAR in call.sampling]


# How far an episode is off the policy is measured by the effective sample size (Σw)² / (n·Σw²) of
# its n tokens (Kish, 1965), a share of them from 0 to 1. The ratios w = policy/sampled
# are those of the loss, truncated at `off_policy.ratio_cap`; otherwise one token in a thousand
# would dominate all others, and long episodes would have smaller shares. A shifted mean of the
# ratios is bounded separately, for each call (`trainer.learners.off_policy`).


def effective_share(log_ratios: Sequence[float], cap: float) -> float:
    """Return the effective sample size of tokens, as a share of their number.

    `log_ratios` are log(policy/sampled) of each token; ratios are truncated at `cap`. The share is
    0 if all tokens have probability 0 under the policy.
    """
    highest = log(cap)
    truncated = [min(ratio, highest) for ratio in log_ratios]
    # Scaling all weights changes nothing, and keeps the squares from overflowing.
    largest = max(0.0, *truncated)
    weights = [exp(ratio - largest) for ratio in truncated]
    squares = fsum(weight * weight for weight in weights)
    return fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def shares_by_episode(
    rows: Sequence[Row], policy: Sequence[Sequence[float]], cap: float
) -> dict[UUID, float]:
    """Return each episode's effective sample size, as a share of its tokens in `rows`.

    `policy` has the log-probabilities (S,) of each row's sampled tokens under the policy.
    """
    log_ratios: dict[UUID, list[float]] = {}
    for row, own in zip(rows, policy, strict=True):
        pairs = zip(own, row.sampled_logprobs, strict=True)
        log_ratios.setdefault(row.episode_id, []).extend(new - old for new, old in pairs)
    return {episode: effective_share(ratios, cap) for episode, ratios in log_ratios.items()}


def episodes_too_far(shares: Mapping[UUID, float], least: float) -> dict[UUID, float]:
    """Return the episodes whose share is below `least`.

    An episode with the share NaN is not included: the learner reports what is wrong with it.
    """
    return {episode: share for episode, share in shares.items() if share < least}


def smallest_share_metric(shares: Mapping[UUID, float]) -> dict[str, float]:
    """Return the smallest finite share as a metric of the update, if there is one."""
    numbers = [share for share in shares.values() if isfinite(share)]
    return {"smallest_effective_sample": min(numbers)} if numbers else {}
