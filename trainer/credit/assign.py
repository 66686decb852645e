"""Assign credit for the trainer: groups of episodes in, credited transitions out (pure)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from store.records import Episode, Group, Record, TransitionRow
from store.values.rewards import REWARD_ALONE, RewardRule
from trainer.credit.accounts import EpisodeAccount, account_of
from trainer.credit.calls import CallCredit, credit_accounts
from trainer.credit.moving import NO_MOVING_BASELINES, MovingBaselines
from trainer.credit.returns import MeanReturn
from trainer.recipes.credit import CreditOptions
from trainer.recipes.training import SftOptions

NONE_WITHHELD: Final[Mapping[UUID, str]] = {}


class TransitionCredit(CallCredit, frozen=True, kw_only=True):
    """Hold a call's credit and the recorded call; `position` is its index in the episode."""

    episode_id: UUID
    episode: str
    call: TransitionRow
    position: int


class Credited(Record, frozen=True, kw_only=True):
    """Hold an update's credit by transition, each episode's mean return, and the next baselines."""

    transitions: tuple[TransitionCredit, ...]
    returns: Mapping[UUID, MeanReturn]
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
    reward: RewardRule = REWARD_ALONE,
) -> Credited:
    """Return the credit of every transition of an update, ordered by group, episode and call.

    - Calls that another policy than `policy` sampled are not trainable.
    - Episodes without a task are compared with no other.
    - A group's `earlier` episodes count in the baseline of the others and get no credit.
    - An episode with a trainable call from a version before `oldest_version` is stale: it
      counts in the baseline of the others and is not trained.
    - So is an episode in `withheld`, which says why by episode id.
    - An episode that `kept` does not keep is not trained (None: all are kept).

    `baselines` are the moving baselines that the last update left; only the recipe's
    `baseline = "moving"` uses them. `reward` says what a reward is the sum of.
    """

    def why(episode: Episode) -> str | None:
        return _stale(episode, oldest_version) or withheld.get(episode.id)

    accounted = [one for group in groups for one in _account(group, policy, reward, why)]
    accounts = [[account for _, account in group] for group in accounted]
    credited = credit_accounts(accounts, rule, baselines, kept)
    flat = [pair for group in accounted for pair in group]
    new = [
        (episode, credit, mean_return)
        for (episode, account), credit, mean_return in zip(
            flat, credited.calls, credited.returns, strict=True
        )
        if not account.earlier
    ]
    return Credited(
        transitions=tuple(
            _transition(episode, position, credit)
            for episode, own, _ in new
            for position, credit in enumerate(own)
        ),
        returns={episode.id: mean_return for episode, _, mean_return in new},
        baselines=credited.baselines,
    )


AccountedGroup = list[tuple[Episode, EpisodeAccount]]


def _account(
    group: Group,
    policy: str,
    rule: RewardRule,
    why_withheld: Callable[[Episode], str | None],
) -> list[AccountedGroup]:
    """Return the group's episodes with their accounts, one list for each set to compare."""
    accounted = [
        (episode, account_of(episode, rule, withheld=why_withheld(episode)))
        for episode in (_for_policy(episode, policy) for episode in group.episodes)
    ]
    if not group.task:
        return [[pair] for pair in accounted]
    earlier = [(episode, account_of(episode, rule, earlier=True)) for episode in group.earlier]
    return [accounted + earlier]


def _for_policy(episode: Episode, policy: str) -> Episode:
    """Return the episode with the calls of other policies marked as not trainable."""
    calls = tuple(
        msgspec.structs.replace(call, trainable=False, reason="other_policy")
        if call.trainable and call.policy != policy
        else call
        for call in episode.calls
    )
    return msgspec.structs.replace(episode, calls=calls)


def _stale(episode: Episode, oldest_version: int) -> str | None:
    versions = [call.policy_version or 0 for call in episode.calls if call.trainable]
    return "stale" if any(version < oldest_version for version in versions) else None


def _transition(episode: Episode, position: int, credit: CallCredit) -> TransitionCredit:
    return TransitionCredit(
        episode_id=episode.id,
        episode=episode.key,
        call=episode.calls[position],
        position=position,
        r_final=credit.r_final,
        r_air=credit.r_air,
        r_total=credit.r_total,
        advantage=credit.advantage,
        weight=credit.weight,
        reason=credit.reason,
        parts=credit.parts,
    )
