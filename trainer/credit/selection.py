"""Keep the best episodes of an update, for a learner that imitates them (pure).

An episode is kept if its final reward is at least `sft.min_reward`; and, with `sft.most_per_task`,
if not so many others of its task have a higher return. Of equal returns the later episode is kept:
a newer version sampled it. What could not be trained anyway takes nobody's place.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

import msgspec

from trainer.credit.advantages import EpisodeReturns
from trainer.credit.returns import mean_return
from trainer.recipes.training import SftOptions

# Reasons why an episode is not trained: its final reward, or the returns of others.
LOW_REWARD: Final = "low_reward"
NOT_BEST: Final = "not_best"


def with_best_kept(episodes: Sequence[EpisodeReturns], rule: SftOptions) -> list[EpisodeReturns]:
    """Return the episodes, withheld with the reason if they are not kept.

    Those of one group follow each other.
    """
    reasons: dict[int, str] = {}
    numbered = enumerate(episodes)
    for _, group in groupby(numbered, key=lambda pair: pair[1].group):
        reasons |= _left_out([(index, one) for index, one in group if _may_be_kept(one)], rule)
    return [
        _withheld(one, reasons[index]) if index in reasons else one
        for index, one in enumerate(episodes)
    ]


def _may_be_kept(one: EpisodeReturns) -> bool:
    account = one.account
    if account.excluded is not None or account.earlier or account.withheld is not None:
        return False
    is_scored = mean_return(one.returns).r_final is not None
    return is_scored and any(call.trainable for call in account.calls)


def _left_out(group: Iterable[tuple[int, EpisodeReturns]], rule: SftOptions) -> dict[int, str]:
    """Return why, by index, for the members of a group that are not kept."""
    ranked: list[tuple[float, int]] = []
    reasons: dict[int, str] = {}
    for index, one in group:
        mean = mean_return(one.returns)
        assert mean.r_final is not None
        if mean.r_final < rule.min_reward:
            reasons[index] = LOW_REWARD
        else:
            ranked.append((mean.r_final + mean.r_air, index))
    ranked.sort(reverse=True)
    worse = [] if rule.most_per_task is None else ranked[rule.most_per_task :]
    return reasons | {index: NOT_BEST for _, index in worse}


def _withheld(one: EpisodeReturns, reason: str) -> EpisodeReturns:
    account = msgspec.structs.replace(one.account, withheld=reason)
    return msgspec.structs.replace(one, account=account)
