"""Assign credit: from the episodes of an update to the credit of each call (pure).

The steps are returns, advantages, the choice of trained calls, and loss weights. The trainer calls
`assign_credit` on the store's groups, `pawl credit` calls `credit_accounts` on exported lines.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import fsum
from typing import Final
from uuid import UUID

import msgspec

from store.records import SIDE, Episode, Group, Record, TransitionRow
from store.tenants import task_family
from store.values.rewards import NO_PARTS, REWARD_ALONE, RewardRule
from trainer.credit.advantages import (
    UNSCORED,
    Advantage,
    AdvantageSteps,
    EpisodeReturns,
    advantages,
)
from trainer.credit.air import RewardRange
from trainer.credit.moving import NO_MOVING_BASELINES, MovingBaselines
from trainer.credit.returns import (
    CallReturn,
    EpisodeAccount,
    Return,
    account_of,
    call_returns,
    claim_scale,
    mean_return,
)
from trainer.recipes.recipe import CreditOptions, SftOptions

# Reasons not to imitate an episode: its final reward is too low, or enough other episodes of its
# task have higher returns.
LOW_REWARD: Final = "low_reward"
NOT_BEST: Final = "not_best"
# Range of rewards if none is given.
UNIT_RANGE: Final[RewardRange] = (0.0, 1.0)
# If an update's calls have more sampled tokens than this on average, the policy is assumed to think
# before it answers.
LONG_CALL: Final = 512
# Largest factor by which balancing task families may raise the weight of a small family.
MAX_FAMILY_FACTOR: Final = 4.0
NONE_WITHHELD: Final[Mapping[UUID, str]] = {}
ALL_TRUSTED: Final[Mapping[str, float]] = {}
# Reason not to train a call: its reward is the opinion of a judge with trust 0.
UNTRUSTED: Final = "untrusted"


class CallCredit(Record, frozen=True, kw_only=True):
    """One call's rewards, advantage and share of the update's loss.

    `r_final`, `r_total` and `advantage` are None if the call is unscored; `advantage` is also None
    if a teacher gives each token an advantage. `r_total` is r_final plus weighted r_air. `reason`
    says why the call is not trained (None: it is). `parts` is each metric's contribution if
    `r_final` is a sum of metrics. `comparison` has the steps from the return to the advantage.
    """

    r_final: float | None
    r_air: float
    r_total: float | None
    advantage: float | None
    weight: float
    reason: str | None
    parts: Mapping[str, float] = NO_PARTS
    comparison: AdvantageSteps | None = None


class TransitionCredit(CallCredit, frozen=True, kw_only=True):
    """A call's credit and the recorded call; `position` is its index in the episode.

    `correction` is the share of the loss of the call's correction, 0 if it has none.
    """

    episode_id: UUID
    episode: str
    call: TransitionRow
    position: int
    correction: float = 0.0


class CreditedAccounts(Record, frozen=True, kw_only=True):
    """The credit of each episode's calls, each episode's mean return, and the next baselines."""

    calls: tuple[tuple[CallCredit, ...], ...]
    returns: tuple[Return, ...]
    baselines: MovingBaselines


class UpdateCredit(Record, frozen=True, kw_only=True):
    """The credit of an update's transitions, each episode's mean return, and the next baselines."""

    transitions: tuple[TransitionCredit, ...]
    returns: Mapping[UUID, Return]
    baselines: MovingBaselines


def assign_credit(
    groups: Sequence[Group],
    rule: CreditOptions,
    *,
    policy: str,
    oldest_version: int,
    baselines: MovingBaselines = NO_MOVING_BASELINES,
    withheld: Mapping[UUID, str] = NONE_WITHHELD,
    kept: SftOptions | None = None,
    taught: bool = False,
    reward: RewardRule = REWARD_ALONE,
    reward_range: RewardRange = UNIT_RANGE,
    trust: Mapping[str, float] = ALL_TRUSTED,
) -> UpdateCredit:
    """Return the credit of every transition of an update, ordered by group, episode and call.

    - Calls that a policy other than `policy` sampled are not trainable.
    - Episodes without a task are not compared with each other.
    - A group's `earlier` episodes count in the group's baseline and get no credit.
    - An episode with a trainable call from a version before `oldest_version` is stale: it
      counts in the group's baseline and is not trained.
    - An episode in `withheld`, which maps episode ids to reasons, is treated like a stale one.
    - An episode that the rule `kept` does not select is not trained (None: all are selected).
    - With `taught`, a teacher gives the advantages, and no reward is needed.

    `baselines` are the moving baselines after the last update. `reward` is the rule that sums
    metrics, and `reward_range` the lowest and highest reward. `trust` is the weight, 0 to 1, of
    opinions by the judge's name; facts, and judges not named, have weight 1.
    """

    def why_withheld(episode: Episode) -> str | None:
        versions = [call.policy_version or 0 for call in episode.calls if call.trainable]
        if any(version < oldest_version for version in versions):
            return "stale"
        return withheld.get(episode.id)

    accounted = [
        pair for group in groups for pair in _account_group(group, policy, reward, why_withheld)
    ]
    accounts = [[account for _, account in group] for group in accounted]
    # With a teacher no reward counts, so no judge's opinion either.
    trust = ALL_TRUSTED if taught else trust
    credited = credit_accounts(accounts, rule, baselines, kept, reward_range, trust, taught=taught)
    flat = [pair for group in accounted for pair in group]
    new = [
        (episode, credit, mean)
        for (episode, account), credit, mean in zip(
            flat, credited.calls, credited.returns, strict=True
        )
        if not account.earlier
    ]
    return UpdateCredit(
        transitions=tuple(
            TransitionCredit(
                **msgspec.structs.asdict(credit),
                episode_id=episode.id,
                episode=episode.key,
                call=episode.calls[position],
                position=position,
            )
            for episode, own, _ in new
            for position, credit in enumerate(own)
        ),
        returns={episode.id: mean for episode, _, mean in new},
        baselines=credited.baselines,
    )


AccountedGroup = list[tuple[Episode, EpisodeAccount]]


def _account_group(
    group: Group,
    policy: str,
    rule: RewardRule,
    why_withheld: Callable[[Episode], str | None],
) -> list[AccountedGroup]:
    """Return episodes with their accounts, as lists of episodes to compare with each other."""
    accounted = [
        (episode, account_of(episode, rule, withheld=why_withheld(episode)))
        for episode in (_mark_other_policies(episode, policy) for episode in group.episodes)
    ]
    if not group.task:
        return [[pair] for pair in accounted]
    earlier = [(episode, account_of(episode, rule, earlier=True)) for episode in group.earlier]
    return [accounted + earlier]


def _mark_other_policies(episode: Episode, policy: str) -> Episode:
    """Return the episode with the calls of other policies marked as not trainable."""
    calls = tuple(
        msgspec.structs.replace(call, trainable=False, reason="other_policy")
        if call.trainable and call.policy != policy
        else call
        for call in episode.calls
    )
    return msgspec.structs.replace(episode, calls=calls)


def credit_accounts(
    groups: Sequence[Sequence[EpisodeAccount]],
    rule: CreditOptions,
    baselines: MovingBaselines = NO_MOVING_BASELINES,
    kept: SftOptions | None = None,
    reward_range: RewardRange = UNIT_RANGE,
    trust: Mapping[str, float] = ALL_TRUSTED,
    *,
    taught: bool = False,
) -> CreditedAccounts:
    """Return the advantage and weight of every call, ordered by group, episode and call.

    `kept` selects the trained episodes of each group (None: all). With `taught`, calls need no
    reward and get no advantage here.
    """
    scale = claim_scale([account for group in groups for account in group], rule, reward_range)
    episodes = [
        EpisodeReturns(
            group=number, account=account, returns=tuple(call_returns(account, rule, scale))
        )
        for number, group in enumerate(groups)
        for account in group
    ]
    if kept is not None:
        episodes = withhold_not_best(episodes, kept)
    by_episode, after = advantages(episodes, rule, baselines, reward_range)
    if taught:
        by_episode = [[UNSCORED] * len(own) for own in by_episode]
    reasons = [
        [
            _why_not_trained(episode, place, advantage, trust, taught=taught)
            for place, advantage in enumerate(own)
        ]
        for episode, own in zip(episodes, by_episode, strict=True)
    ]
    sampled = [
        [
            call.sampled if reason is None else None
            for call, reason in zip(episode.account.calls, own, strict=True)
        ]
        for episode, own in zip(episodes, reasons, strict=True)
    ]
    families = [task_family(episode.account.task) for episode in episodes]
    shares = [[trust.get(one.source or "", 1.0) for one in episode.returns] for episode in episodes]
    weights = loss_weights(sampled, families, rule, shares)
    return CreditedAccounts(
        calls=tuple(
            tuple(map(_call_credit, episode.returns, own, weight, reason))
            for episode, own, weight, reason in zip(
                episodes, by_episode, weights, reasons, strict=True
            )
        ),
        returns=tuple(mean_return(episode.returns) for episode in episodes),
        baselines=after,
    )


def _call_credit(
    call: CallReturn, advantage: Advantage, weight: float, reason: str | None
) -> CallCredit:
    return CallCredit(
        r_final=call.r_final,
        r_air=call.r_air,
        r_total=None if call.r_final is None else call.r_final + advantage.air_weight * call.r_air,
        advantage=advantage.value,
        weight=weight,
        reason=reason,
        parts=call.parts,
        comparison=advantage.comparison,
    )


def _why_not_trained(
    episode: EpisodeReturns,
    position: int,
    advantage: Advantage,
    trust: Mapping[str, float],
    *,
    taught: bool,
) -> str | None:
    """Return why a call is not trained, or None; exclusion of its episode is reported first."""
    account, returned = episode.account, episode.returns[position]
    call = account.calls[position]
    not_compared = account.excluded or ("earlier" if account.earlier else None)
    if not_compared is not None or call.reason == SIDE:
        return not_compared or SIDE
    if returned.r_final is None and not taught:
        return "failed" if account.failed else returned.lacks or "unscored"
    no_weight = UNTRUSTED if trust.get(returned.source or "", 1.0) == 0.0 else None
    if no_weight or advantage.reason:
        return no_weight or advantage.reason
    if not any(each.trainable for each in account.calls):
        return "no_trainable_call"
    if account.withheld is not None:
        return account.withheld
    return None if call.trainable else call.reason or "not_trainable"


def withhold_not_best(episodes: Sequence[EpisodeReturns], rule: SftOptions) -> list[EpisodeReturns]:
    """Mark the episodes that a learner must not imitate as withheld, with the reason.

    An episode is kept if its final reward is at least `sft.min_reward` and its return is among the
    highest `sft.most_per_task` of its group (unset: all). Of equal returns the later episode is
    kept, because a newer version sampled it. Episodes that cannot be trained anyway do not count.
    The episodes of a group must be adjacent.
    """
    reasons: dict[int, str] = {}
    for _, group in groupby(enumerate(episodes), key=lambda pair: pair[1].group):
        ranked: list[tuple[float, int]] = []
        for index, episode in group:
            mean = mean_return(episode.returns)
            if mean.r_final is None or not _may_be_imitated(episode.account):
                continue
            if mean.r_final < rule.min_reward:
                reasons[index] = LOW_REWARD
            else:
                ranked.append((mean.r_final + mean.r_air, index))
        most = len(ranked) if rule.most_per_task is None else rule.most_per_task
        reasons |= {index: NOT_BEST for _, index in sorted(ranked, reverse=True)[most:]}
    replace = msgspec.structs.replace
    return [
        replace(episode, account=replace(episode.account, withheld=reasons[index]))
        if index in reasons
        else episode
        for index, episode in enumerate(episodes)
    ]


def _may_be_imitated(account: EpisodeAccount) -> bool:
    if account.excluded is not None or account.earlier or account.withheld is not None:
        return False
    return any(call.trainable for call in account.calls)


def loss_weights(
    sampled: Sequence[Sequence[int | None]],
    families: Sequence[str],
    rule: CreditOptions,
    trusts: Sequence[Sequence[float]] | None = None,
) -> list[list[float]]:
    """Return each call's share of the update's loss, by episode; 1 in sum (0 if none is trained).

    `sampled` is each call's number of sampled tokens, or None for a call that is not trained, whose
    weight is 0; `families` is the family of each episode's task; `trusts` is a factor for each
    call's weight, 0 to 1 (None: 1). The recipe's `equal_weight` says which units weigh the same:

    - `episode`: each trained episode, divided equally among its trained calls.
    - `call`: each trained call.
    - `token`: each sampled token. Like Dr. GRPO (arXiv:2503.20783 §3.2) this leaves out the mean
      over a call's own tokens; the divisor is the update's token count instead of a constant.
    - `auto`: each family; within a family each token if calls are long (`LONG_CALL`), else each
      episode. So the most frequent task's answer does not become the answer to everything. A
      family's weight is raised at most `MAX_FAMILY_FACTOR` times.
    """
    unit = rule.equal_weight
    if unit == "auto":
        trained = [tokens for own in sampled for tokens in own if tokens is not None]
        unit = "token" if sum(trained) > LONG_CALL * len(trained) else "episode"
    sizes = [_call_sizes(own, unit) for own in sampled]
    if rule.equal_weight == "auto":
        sizes = _even_families(sizes, families)
    if trusts is not None:
        pairs = zip(sizes, trusts, strict=True)
        sizes = [[size * share for size, share in zip(*pair, strict=True)] for pair in pairs]
    total = fsum(size for own in sizes for size in own)
    return [[size / total if size else 0.0 for size in own] for own in sizes]


def _call_sizes(sampled: Sequence[int | None], unit: str) -> list[float]:
    """Return the unscaled weight of each call of an episode, before families are balanced."""
    if unit == "token":
        return [0.0 if tokens is None else float(max(tokens, 1)) for tokens in sampled]
    trained = len(sampled) - sampled.count(None)
    each = 1.0 / trained if unit == "episode" and trained else 1.0
    return [0.0 if tokens is None else each for tokens in sampled]


def _even_families(sizes: Sequence[Sequence[float]], families: Sequence[str]) -> list[list[float]]:
    """Scale sizes so that all families have the same sum; no factor exceeds `MAX_FAMILY_FACTOR`."""
    by_family: dict[str, list[float]] = {}
    for own, family in zip(sizes, families, strict=True):
        by_family.setdefault(family, []).extend(own)
    sums = {family: fsum(own) for family, own in by_family.items()}
    trained = [family_sum for family_sum in sums.values() if family_sum]
    mean_sum = fsum(trained) / max(1, len(trained))
    return [
        [size * min(MAX_FAMILY_FACTOR, mean_sum / sums[family]) if size else 0.0 for size in own]
        for own, family in zip(sizes, families, strict=True)
    ]
