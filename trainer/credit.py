"""Credit: from an update's episodes to what each transition is worth (pure, float64).

Identical assignment (Agent Lightning, arXiv:2508.03680 §3.2.1): every transition of an
episode gets the episode's return. Group-relative advantages (GRPO, arXiv:2402.03300
§4.1.2), with baseline and spread over *episodes*, never over rows:

    r_total   = r_final + r_air
    advantage = (r_total − mean) / max(s, smallest_spread)
    weight    = 1 / (episodes trained · the episode's trainable calls)

mean and s (sample standard deviation) over the group's scored episodes, before anything is
dropped. Unscored is not zero, and failed is not unscored.
"""

from collections.abc import Sequence
from math import fsum, sqrt
from typing import Final, Literal
from uuid import UUID

from store.records import REWARD, Episode, Feedback, Group, Record, TransitionRow
from trainer.air import air_reward, standing_events
from trainer.recipe_parts import CreditPart

EpisodeReason = Literal["unscored", "alone", "no_spread", "stale", "no_trainable_call"]
FAILED: Final = "failed"


class EpisodeReturn(Record, frozen=True, kw_only=True):
    """What an episode earned; `r_final` is None where nobody scored it."""

    episode: Episode
    r_final: float | None
    r_air: float

    @property
    def r_total(self) -> float | None:
        """r_final + r_air; None where there is no r_final."""
        return None if self.r_final is None else self.r_final + self.r_air


class TransitionCredit(Record, frozen=True, kw_only=True):
    """What one call is worth in the update's loss; `reason` says why it is not in it."""

    episode_id: UUID
    episode: str
    call: TransitionRow
    # The call's place among the episode's.
    position: int
    r_final: float | None
    r_air: float
    r_total: float | None
    advantage: float | None
    weight: float
    reason: str | None


def newest(statements: Sequence[Feedback], metric: str) -> float | None:
    """The value of the newest statement of `metric`; None if there is none."""
    said = [statement for statement in statements if statement.metric == metric]
    return max(said, key=lambda statement: statement.at).value if said else None


def has_failed(episode: Episode) -> bool:
    """Whether the episode's last call did not come to a proper reply."""
    if not episode.calls:
        return False
    last = episode.calls[-1]
    return last.status != "complete" or (last.http_status or 0) >= 400


def episode_return(episode: Episode, rule: CreditPart) -> EpisodeReturn:
    """The return of one episode."""
    r_final = newest(episode.feedback, REWARD)
    if r_final is None and has_failed(episode):
        r_final = rule.failed_reward
    r_air = air_reward(standing_events(episode), rule.air_scores, rule.air_lambda)
    return EpisodeReturn(episode=episode, r_final=r_final, r_air=r_air)


def group_advantages(totals: Sequence[float], smallest_spread: float) -> list[float] | None:
    """Advantages of a group's scored episodes; None where they give no signal."""
    if len(totals) < 2 or max(totals) == min(totals):
        return None
    mean = fsum(totals) / len(totals)
    variance = fsum((total - mean) ** 2 for total in totals) / (len(totals) - 1)
    return [(total - mean) / max(sqrt(variance), smallest_spread) for total in totals]


def assign_credit(
    groups: Sequence[Group], rule: CreditPart, *, oldest_version: int
) -> list[TransitionCredit]:
    """The credit of every transition of an update, in the order of groups and calls.

    Episodes with a call from before `oldest_version` are stale: they count in their group's
    baseline and are not trained.
    """
    judged = [pair for group in groups for pair in _judge_group(group, rule, oldest_version)]
    trained = sum(1 for _, _, reason in judged if reason is None)
    return [
        _transition_credit(earned, position, advantage, reason, trained)
        for earned, advantage, reason in judged
        for position in range(len(earned.episode.calls))
    ]


Judged = tuple[EpisodeReturn, float | None, EpisodeReason | None]


def _judge_group(group: Group, rule: CreditPart, oldest_version: int) -> list[Judged]:
    returns = [episode_return(episode, rule) for episode in group.episodes]
    totals = [earned.r_total for earned in returns if earned.r_total is not None]
    advantages = group_advantages(totals, rule.smallest_spread)
    if advantages is None:
        why: EpisodeReason = "alone" if len(totals) < 2 else "no_spread"
        return [
            (earned, None, why if earned.r_total is not None else "unscored") for earned in returns
        ]
    remaining = iter(advantages)
    return [
        _judge_episode(earned, next(remaining), oldest_version)
        if earned.r_total is not None
        else (earned, None, "unscored")
        for earned in returns
    ]


def _judge_episode(earned: EpisodeReturn, advantage: float, oldest_version: int) -> Judged:
    calls = earned.episode.calls
    if not any(call.trainable for call in calls):
        return earned, advantage, "no_trainable_call"
    if any((call.policy_version or 0) < oldest_version for call in calls if call.trainable):
        return earned, advantage, "stale"
    return earned, advantage, None


def _transition_credit(
    earned: EpisodeReturn,
    position: int,
    advantage: float | None,
    episode_reason: str | None,
    episodes_trained: int,
) -> TransitionCredit:
    call = earned.episode.calls[position]
    reason = episode_reason or (None if call.trainable else call.reason)
    trainable_calls = sum(1 for other in earned.episode.calls if other.trainable)
    return TransitionCredit(
        episode_id=earned.episode.id,
        episode=earned.episode.key,
        call=call,
        position=position,
        r_final=earned.r_final,
        r_air=earned.r_air,
        r_total=earned.r_total,
        advantage=advantage,
        weight=1.0 / (episodes_trained * trainable_calls) if reason is None else 0.0,
        reason=reason,
    )
