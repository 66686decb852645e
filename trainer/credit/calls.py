"""Credit every call of an update: returns, advantages and loss weights (pure)."""

from collections.abc import Mapping, Sequence

from store.records import Record
from store.values.rewards import NO_PARTS
from trainer.credit.accounts import CallAccount, EpisodeAccount
from trainer.credit.advantages import Advantage, EpisodeReturns, advantages
from trainer.credit.moving import NO_MOVING_BASELINES, MovingBaselines
from trainer.credit.returns import CallReturn, MeanReturn, call_returns, mean_return
from trainer.credit.selection import with_best_kept
from trainer.credit.weights import loss_weights
from trainer.recipes.credit import CreditOptions
from trainer.recipes.training import SftOptions


class CallCredit(Record, frozen=True, kw_only=True):
    """Hold one call's rewards, advantage and share of the update's loss.

    `r_final`, `r_total` and `advantage` are None if nobody scored the call. `reason` says why
    the call is not trained; it is None for calls that are. `parts` are what each metric adds to the
    reward that `r_final` is a share of, where that is a sum.
    """

    r_final: float | None
    r_air: float
    r_total: float | None
    advantage: float | None
    weight: float
    reason: str | None
    parts: Mapping[str, float] = NO_PARTS


class CreditedAccounts(Record, frozen=True, kw_only=True):
    """Hold credit and mean returns by episode, and the next moving baselines."""

    calls: tuple[tuple[CallCredit, ...], ...]
    returns: tuple[MeanReturn, ...]
    baselines: MovingBaselines


def credit_accounts(
    groups: Sequence[Sequence[EpisodeAccount]],
    rule: CreditOptions,
    baselines: MovingBaselines = NO_MOVING_BASELINES,
    kept: SftOptions | None = None,
) -> CreditedAccounts:
    """Return the credit of every call, ordered by group, episode and call.

    Of each group only the episodes are trained that `kept` keeps (None: all).
    """
    episodes = [
        EpisodeReturns(group=number, account=account, returns=tuple(call_returns(account, rule)))
        for number, group in enumerate(groups)
        for account in group
    ]
    if kept is not None:
        episodes = with_best_kept(episodes, kept)
    by_episode, after = advantages(episodes, rule, baselines)
    reasons = [
        [_reason(episode, position, own, rule) for position, own in enumerate(call_advantages)]
        for episode, call_advantages in zip(episodes, by_episode, strict=True)
    ]
    weights = loss_weights(list(map(_trained_tokens, episodes, reasons)), rule)
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


def _trained_tokens(episode: EpisodeReturns, reasons: Sequence[str | None]) -> list[int | None]:
    """Return each call's number of sampled tokens, or None if there is a reason not to train it."""
    return [
        call.sampled if reason is None else None
        for call, reason in zip(episode.account.calls, reasons, strict=True)
    ]


def _call_credit(
    call: CallReturn, advantage: Advantage, weight: float, reason: str | None
) -> CallCredit:
    return CallCredit(
        r_final=call.r_final,
        r_air=call.r_air,
        r_total=call.r_total,
        advantage=advantage.value,
        weight=weight,
        reason=reason,
        parts=call.parts,
    )


def _reason(
    episode: EpisodeReturns, position: int, advantage: Advantage, rule: CreditOptions
) -> str | None:
    """Return why a call is not trained, or None; reasons of the whole episode come first."""
    account, call = episode.account, episode.returns[position]
    if account.excluded is not None or account.earlier:
        return account.excluded or "earlier"
    if call.value is None:
        return "failed" if account.failed else call.lacks or "unscored"
    if advantage.reason is not None:
        return advantage.reason
    if not any(each.trainable for each in account.calls):
        return "no_trainable_call"
    return account.withheld or _call_reason(account.calls[position], call, rule)


def _call_reason(account: CallAccount, call: CallReturn, rule: CreditOptions) -> str | None:
    if not account.trainable:
        return account.reason or "not_trainable"
    if rule.assignment in ("first_call", "last_call") and call.share == 0:
        return f"not_{rule.assignment}"
    return None
