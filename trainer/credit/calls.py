"""From what the calls of an update are paid to their shares of its loss (pure)."""

from collections.abc import Sequence
from typing import Final

from store.records import Record
from trainer.credit.accounts import CallAccount, EpisodeAccount
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
