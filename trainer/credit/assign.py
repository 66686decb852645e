"""All of it: from groups of episodes to what each of their calls is worth (pure)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final
from uuid import UUID

from store.records import Episode, Group, Record, TransitionRow
from trainer.credit.accounts import CallAccount, EpisodeAccount, account_of
from trainer.credit.advantages import Advantage, Paid, advantages
from trainer.credit.moving import NO_BASELINES, Baselines
from trainer.credit.returns import CallReturn, EpisodeReturn, call_returns, episode_return
from trainer.credit.weights import weights
from trainer.recipe_parts import CreditPart

NOBODY_SCORED: Final = Advantage(value=None, reason=None)


class CallCredit(Record, frozen=True, kw_only=True):
    """What one call is worth in the update's loss; `reason` says why it is not in it."""

    r_final: float | None
    r_air: float
    r_total: float | None
    advantage: float | None
    weight: float
    reason: str | None


class CreditedAccounts(Record, frozen=True, kw_only=True):
    """The calls' credit and the returns of episodes, in their order, and the next baselines."""

    calls: tuple[tuple[CallCredit, ...], ...]
    returns: tuple[EpisodeReturn, ...]
    baselines: Baselines


class TransitionCredit(CallCredit, frozen=True, kw_only=True):
    """The same with the call that was recorded; `position` is its place in its episode."""

    episode_id: UUID
    episode: str
    call: TransitionRow
    position: int


class Credited(Record, frozen=True, kw_only=True):
    """An update's credit: by transition, the return of each episode, and the next baselines."""

    transitions: tuple[TransitionCredit, ...]
    returns: Mapping[UUID, EpisodeReturn]
    baselines: Baselines


def assign_credit(
    groups: Sequence[Group],
    rule: CreditPart,
    *,
    oldest_version: int,
    baselines: Baselines = NO_BASELINES,
    withheld: Mapping[UUID, str] = MappingProxyType({}),
) -> Credited:
    """The credit of every transition of an update, in the order of groups and calls.

    Episodes with a call from before `oldest_version` are stale. They, and those that `withheld`
    gives another reason for, count in what others are compared with and are not trained.
    `baselines` are those that the update before left (of effect for the moving one alone).
    """
    accounts = [
        [
            account_of(episode, withheld.get(episode.id) or _stale(episode, oldest_version))
            for episode in group.episodes
        ]
        for group in groups
    ]
    found = credit_accounts(accounts, rule, baselines)
    episodes = [episode for group in groups for episode in group.episodes]
    return Credited(
        transitions=tuple(
            _transition(episode, position, credit)
            for episode, own in zip(episodes, found.calls, strict=True)
            for position, credit in enumerate(own)
        ),
        returns={
            episode.id: earned for episode, earned in zip(episodes, found.returns, strict=True)
        },
        baselines=found.baselines,
    )


def credit_accounts(
    groups: Sequence[Sequence[EpisodeAccount]],
    rule: CreditPart,
    baselines: Baselines = NO_BASELINES,
) -> CreditedAccounts:
    """The credit of every call, in the order of groups, episodes and calls."""
    paid = [
        Paid(group=number, account=account, returns=tuple(call_returns(account, rule)))
        for number, group in enumerate(groups)
        for account in group
    ]
    found, after = advantages(paid, rule, baselines)
    reasons = [
        [
            _reason(one, position, found.get((index, position), NOBODY_SCORED), rule)
            for position in range(len(one.returns))
        ]
        for index, one in enumerate(paid)
    ]
    shares = _weights(paid, reasons, rule)
    return CreditedAccounts(
        calls=tuple(
            tuple(
                CallCredit(
                    r_final=own.r_final,
                    r_air=own.r_air,
                    r_total=own.r_total,
                    advantage=found.get((index, position), NOBODY_SCORED).value,
                    weight=shares[index].get(position, 0.0),
                    reason=reasons[index][position],
                )
                for position, own in enumerate(one.returns)
            )
            for index, one in enumerate(paid)
        ),
        returns=tuple(episode_return(one.returns) for one in paid),
        baselines=after,
    )


def _stale(episode: Episode, oldest_version: int) -> str | None:
    versions = [call.policy_version or 0 for call in episode.calls if call.trainable]
    return "stale" if any(version < oldest_version for version in versions) else None


def _reason(paid: Paid, position: int, advantage: Advantage, rule: CreditPart) -> str | None:
    """Why a call is not trained: what is said of its episode comes first."""
    account, own = paid.account, paid.returns[position]
    if account.set_aside is not None:
        return account.set_aside
    if own.value is None:
        return "failed" if account.failed else "unscored"
    if advantage.reason is not None:
        return advantage.reason
    if not any(call.trainable for call in account.calls):
        return "no_trainable_call"
    return account.withheld or _calls_own_reason(account.calls[position], own, rule)


def _calls_own_reason(call: CallAccount, paid: CallReturn, rule: CreditPart) -> str | None:
    if not call.trainable:
        return call.reason or "not_trainable"
    if rule.assignment in ("first_call", "last_call") and paid.share == 0:
        return f"not_{rule.assignment}"
    return None


def _weights(
    paid: Sequence[Paid], reasons: Sequence[Sequence[str | None]], rule: CreditPart
) -> list[dict[int, float]]:
    """Of each episode's trained calls, by their position."""
    trained = [
        [position for position, reason in enumerate(own) if reason is None] for own in reasons
    ]
    sampled = [
        [one.account.calls[position].sampled for position in positions]
        for one, positions in zip(paid, trained, strict=True)
    ]
    return [
        dict(zip(positions, own, strict=True))
        for positions, own in zip(trained, weights(sampled, rule), strict=True)
    ]


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
    )
