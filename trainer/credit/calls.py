"""From what the calls of an update are paid to their shares of its loss (pure)."""

from collections.abc import Sequence

from store.records import Record
from trainer.credit.accounts import CallAccount, EpisodeAccount
from trainer.credit.advantages import Advantage, Paid, advantages
from trainer.credit.moving import NO_BASELINES, Baselines
from trainer.credit.returns import CallReturn, EpisodeReturn, call_returns, episode_return
from trainer.credit.weights import weights
from trainer.recipe_parts import CreditPart


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
        [_reason(one, position, own, rule) for position, own in enumerate(theirs)]
        for one, theirs in zip(paid, found, strict=True)
    ]
    shares = weights(
        [
            [
                call.sampled if reason is None else None
                for call, reason in zip(one.account.calls, why, strict=True)
            ]
            for one, why in zip(paid, reasons, strict=True)
        ],
        rule,
    )
    return CreditedAccounts(
        calls=tuple(
            tuple(map(_call_credit, one.returns, own, weight, reason))
            for one, own, weight, reason in zip(paid, found, shares, reasons, strict=True)
        ),
        returns=tuple(episode_return(one.returns) for one in paid),
        baselines=after,
    )


def _call_credit(
    paid: CallReturn, advantage: Advantage, weight: float, reason: str | None
) -> CallCredit:
    return CallCredit(
        r_final=paid.r_final,
        r_air=paid.r_air,
        r_total=paid.r_total,
        advantage=advantage.value,
        weight=weight,
        reason=reason,
    )


def _reason(paid: Paid, position: int, advantage: Advantage, rule: CreditPart) -> str | None:
    """Why a call is not trained: what is said of its episode comes first."""
    account, own = paid.account, paid.returns[position]
    if account.set_aside is not None or account.earlier:
        return account.set_aside or "earlier"
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
