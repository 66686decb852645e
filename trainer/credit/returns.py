"""Compute the return of each call of an episode, by the recipe's `assignment` (pure).

- `identical`: each call gets the episode's return (Agent Lightning, arXiv:2508.03680 §3.3.2).
- `per_agent`: each call gets its agent's return: the mean of the rewards given to single calls
  of that agent (the episode's reward if there are none), plus AIR of that agent's tools.
- `call`: the reward given to the call itself, or the episode's if it was given none.

Rewards for single calls count under `per_agent` and `call` only. Under `identical` they would count
twice, because the episode's reward contains them already.
"""

from collections.abc import Mapping, Sequence

import msgspec

from store.read.facts import MatchedEvent, has_failed, matched_events
from store.records import SIDE, Episode, Record, TransitionRow
from store.values.packing import unpack_ids
from store.values.rewards import NO_PARTS, UNSCORED, Lack, Reward, RewardRule, reward_of
from trainer.credit.air import (
    NO_USUAL_SCORES,
    RewardRange,
    UsualScores,
    air_reward,
    scored_events,
    usual_scores,
)
from trainer.credit.means import mean_of
from trainer.recipes.recipe import CreditOptions


class CallAccount(Record, frozen=True, kw_only=True):
    """The facts about one call that count for credit.

    `reason` says why the call is not trainable (None if it is). `sampled` is its number of sampled
    tokens. `earned` is the reward given to this call alone.
    """

    agent: str
    trainable: bool
    reason: str | None
    sampled: int
    earned: Reward = UNSCORED
    events: tuple[MatchedEvent, ...] = ()


class EpisodeAccount(Record, frozen=True, kw_only=True):
    """The facts about one episode that count for credit.

    `earned` is the reward given to the whole episode. `withheld` says why the episode is compared
    but not trained, `excluded` why it is neither compared nor trained; None if neither applies.
    `earlier` marks an episode that an earlier update consumed: it is compared, not trained again.
    """

    task: str | None
    failed: bool
    earned: Reward = UNSCORED
    calls: tuple[CallAccount, ...]
    withheld: str | None = None
    excluded: str | None = None
    earlier: bool = False


def account_of(
    episode: Episode, rule: RewardRule, *, withheld: str | None = None, earlier: bool = False
) -> EpisodeAccount:
    """Return the account of an episode that was read from the store, scored by `rule`."""
    return EpisodeAccount(
        task=episode.task,
        failed=has_failed(episode),
        earned=reward_of(episode.feedback, rule),
        calls=tuple(_call_account(call, rule) for call in episode.calls),
        withheld=withheld,
        excluded=episode.quarantined_reason,
        earlier=earlier,
    )


def _call_account(call: TransitionRow, rule: RewardRule) -> CallAccount:
    account = CallAccount(
        agent=call.agent,
        trainable=call.trainable,
        reason=call.reason,
        sampled=len(unpack_ids(call.tokens.sampled_ids)),
        earned=reward_of(call.feedback, rule),
        events=matched_events(call),
    )
    return without_side_call_reward(account)


def without_side_call_reward(call: CallAccount) -> CallAccount:
    """Return `call`, or a side call without its own reward and tool events, which do not count."""
    if call.reason != SIDE:
        return call
    return msgspec.structs.replace(call, earned=UNSCORED, events=())


class ClaimScale(Record, frozen=True, kw_only=True):
    """Values that are the same for the returns of all episodes of a claim.

    `failed` is the final reward of a failed episode without a reward (None: it stays unscored),
    `usual` the usual scores of the claim's tools, and `most_air` the largest r_air.
    """

    failed: float | None = None
    usual: UsualScores = NO_USUAL_SCORES
    most_air: float = 0.0


def claim_scale(
    episodes: Sequence[EpisodeAccount], rule: CreditOptions, reward_range: RewardRange
) -> ClaimScale:
    """Return the scale of a claim with these episodes.

    Without a `failed_reward` in the recipe, a failed episode gets the lower end of the reward
    range, or the claim's lowest reward if that is lower still.
    """
    low, high = reward_range
    counted = [episode for episode in episodes if episode.excluded is None]
    failed = rule.failed_reward
    if failed is None:
        earned = [
            one.value
            for episode in counted
            for one in (episode.earned, *(call.earned for call in episode.calls))
            if one.value is not None
        ]
        failed = min([low, *earned])
    events = [
        event
        for episode in counted
        for event in scored_events((event for call in episode.calls for event in call.events), rule)
    ]
    return ClaimScale(
        failed=None if failed == "unscored" else failed,
        usual=usual_scores(events),
        most_air=rule.air_lambda * (high - low),
    )


class Return(Record, frozen=True, kw_only=True):
    """A return in two parts, final reward and AIR; `r_final` is None if no reward counts."""

    r_final: float | None
    r_air: float


class CallReturn(Return, frozen=True, kw_only=True):
    """The return of a call.

    `parts` is each metric's contribution if `r_final` is a sum of metrics. `lacks` says why
    `r_final` is None despite feedback. `source` names the judge if the reward is an opinion; None
    if it is a fact.
    """

    parts: Mapping[str, float] = NO_PARTS
    lacks: Lack | None = None
    source: str | None = None


def call_returns(
    episode: EpisodeAccount, rule: CreditOptions, scale: ClaimScale
) -> list[CallReturn]:
    """Return the return of each call of an episode, in the order of calls.

    A side call's `r_final` is None, even if it was given a reward itself: it is not part of the
    agent's work.
    """
    finals = _final_rewards(episode, rule, scale.failed)
    airs = _air_rewards(episode, rule, scale)
    return [
        CallReturn(r_final=None, r_air=air)
        if call.reason == SIDE
        else CallReturn(
            r_final=earned.value,
            r_air=air,
            parts=earned.parts,
            lacks=earned.lacks,
            source=earned.source,
        )
        for call, earned, air in zip(episode.calls, finals, airs, strict=True)
    ]


def mean_return(returns: Sequence[Return]) -> Return:
    """Return the mean of an episode's call returns; unscored calls are left out of `r_final`."""
    finals = [call.r_final for call in returns if call.r_final is not None]
    airs = [call.r_air for call in returns]
    return Return(r_final=mean_of(finals) if finals else None, r_air=mean_of(airs) if airs else 0.0)


def _final_rewards(
    episode: EpisodeAccount, rule: CreditOptions, failed: float | None
) -> list[Reward]:
    """Return each call's final reward; `failed` is that of a failed, unscored episode."""
    of_episode = episode.earned
    if of_episode.value is None and episode.failed and failed is not None:
        of_episode = Reward(value=failed)
    if episode.excluded is not None:
        return [UNSCORED] * len(episode.calls)
    if rule.assignment == "call":
        single = [call.earned for call in episode.calls]
    elif rule.assignment == "per_agent":
        of_agent = {call.agent: _agent_reward(episode, call.agent) for call in episode.calls}
        single = [of_agent[call.agent] for call in episode.calls]
    else:
        return [of_episode] * len(episode.calls)
    return [_call_or_episode_reward(own, of_episode) for own in single]


def _call_or_episode_reward(own: Reward, of_episode: Reward) -> Reward:
    """Return a call's own reward, or the episode's if the call has none.

    A fact about the episode takes precedence over an opinion about the call. If neither has a
    value, the call's reward is returned if it names a reason (`lacks`), else the episode's.
    """
    if of_episode.value is None:
        return own if own.value is not None or own.lacks else of_episode
    is_outranked = own.source is not None and of_episode.source is None
    return of_episode if own.value is None or is_outranked else own


def _agent_reward(episode: EpisodeAccount, agent: str) -> Reward:
    own = [call.earned for call in episode.calls if call.agent == agent]
    facts = [one for one in own if one.value is not None and one.source is None]
    own = facts or own
    values = [reward.value for reward in own if reward.value is not None]
    if not values:
        return next((reward for reward in own if reward.lacks is not None), UNSCORED)
    scored = [reward.parts for reward in own if reward.value is not None]
    parts = {
        metric: mean_of([parts_of_call[metric] for parts_of_call in scored]) for metric in scored[0]
    }
    source = max((one.source for one in own if one.source), default=None)
    return Reward(value=mean_of(values), parts=parts, source=source)


def _air_rewards(episode: EpisodeAccount, rule: CreditOptions, scale: ClaimScale) -> list[float]:
    def air(agent: str | None) -> float:
        calls = (call for call in episode.calls if agent in (None, call.agent))
        events = scored_events((event for call in calls for event in call.events), rule)
        return air_reward(events, scale.usual, scale.most_air)

    if rule.assignment != "per_agent":
        return [air(None)] * len(episode.calls)
    of_agent = {agent: air(agent) for agent in {call.agent for call in episode.calls}}
    return [of_agent[call.agent] for call in episode.calls]
