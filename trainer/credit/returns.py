"""Compute the return of each call of an episode, by the recipe's `assignment` (pure).

- `identical`: each call gets the episode's return (Agent Lightning, arXiv:2508.03680 §3.3.2).
- `per_agent`: each call gets its agent's return: the mean of the rewards given to single calls
  of that agent (the episode's reward if there are none), plus AIR of that agent's tools.
- `discounted`: the episode's return times `discount` for each call that came after.
- `first_call`, `last_call`: the episode's return goes to its first or last trainable call.
- `call`: the reward given to the call itself, or the episode's if it was given none.

Rewards for single calls count under `per_agent` and `call` only. Elsewhere they would be
added to the episode's reward, of which they are a part already.
"""

from collections.abc import Mapping, Sequence

from store.records import Record
from store.values.rewards import NO_PARTS, UNSCORED, Lack, Reward
from trainer.credit.accounts import EpisodeAccount
from trainer.credit.air import air_rewards
from trainer.credit.means import mean_of
from trainer.recipes.credit import CreditOptions


class CallReturn(Record, frozen=True, kw_only=True):
    """Hold the return that a call's episode is compared by, and the call's share of it.

    Episodes are compared by `value`. The call gets `share` of it (0 to 1), and the same share
    of the advantage. Comparing what is left after sharing would put the first calls of every
    long success below the mean (docs/decisions/017-credit.md). `parts` are what each metric adds to
    `final` where that is a sum; `lacks` says why there is no `final` although something was stated.
    """

    final: float | None
    air: float
    share: float
    parts: Mapping[str, float] = NO_PARTS
    lacks: Lack | None = None

    @property
    def value(self) -> float | None:
        """Return final reward plus AIR before sharing, or None if nobody scored the call."""
        return None if self.final is None else self.final + self.air

    @property
    def r_final(self) -> float | None:
        """Return the call's share of the final reward, or None if nobody scored the call."""
        return None if self.final is None else _shared(self.share, self.final)

    @property
    def r_air(self) -> float:
        """Return the call's share of AIR."""
        return _shared(self.share, self.air)

    @property
    def r_total(self) -> float | None:
        """Return r_final + r_air, or None if nobody scored the call."""
        return None if self.r_final is None else self.r_final + self.r_air


class MeanReturn(Record, frozen=True, kw_only=True):
    """Hold an episode's return: the mean over its calls, before it is shared out among them."""

    r_final: float | None
    r_air: float

    @property
    def r_total(self) -> float | None:
        """Return r_final + r_air, or None if nobody scored the episode."""
        return None if self.r_final is None else self.r_final + self.r_air


def call_returns(episode: EpisodeAccount, rule: CreditOptions) -> list[CallReturn]:
    """Return the return of each call of an episode, in the order of calls."""
    shares = _shares(episode, rule)
    return [
        CallReturn(final=earned.value, air=air, share=share, parts=earned.parts, lacks=earned.lacks)
        for earned, air, share in zip(
            _final_rewards(episode, rule), _air_rewards(episode, rule), shares, strict=True
        )
    ]


def mean_return(returns: Sequence[CallReturn]) -> MeanReturn:
    """Return the mean of an episode's call returns; calls that nobody scored are left out."""
    finals = [call.final for call in returns if call.final is not None]
    airs = [call.air for call in returns]
    return MeanReturn(
        r_final=mean_of(finals) if finals else None, r_air=mean_of(airs) if airs else 0.0
    )


def _shared(share: float, whole: float) -> float:
    return share * whole if share else 0.0


def _final_rewards(episode: EpisodeAccount, rule: CreditOptions) -> list[Reward]:
    """Return each call's final reward; a failed, unscored episode takes `failed_reward`."""
    whole = episode.earned
    if whole.value is None and episode.failed and rule.failed_reward is not None:
        whole = Reward(value=rule.failed_reward)
    if episode.excluded is not None:
        return [UNSCORED] * len(episode.calls)
    single = [UNSCORED] * len(episode.calls)
    if rule.assignment == "call":
        single = [call.earned for call in episode.calls]
    elif rule.assignment == "per_agent":
        of_agent = {call.agent: _agent_reward(episode, call.agent) for call in episode.calls}
        single = [of_agent[call.agent] for call in episode.calls]
    return [_or_whole(own, whole) for own in single]


def _or_whole(own: Reward, whole: Reward) -> Reward:
    """Return a call's own reward, or its episode's; of two that lack something, what it lacks."""
    return own if own.value is not None or (whole.value is None and own.lacks) else whole


def _agent_reward(episode: EpisodeAccount, agent: str) -> Reward:
    own = [call.earned for call in episode.calls if call.agent == agent]
    values = [one.value for one in own if one.value is not None]
    if not values:
        return next((one for one in own if one.lacks is not None), UNSCORED)
    scored = [one.parts for one in own if one.value is not None]
    parts = {metric: mean_of([one[metric] for one in scored]) for metric in scored[0]}
    return Reward(value=mean_of(values), parts=parts)


def _air_rewards(episode: EpisodeAccount, rule: CreditOptions) -> list[float]:
    if rule.assignment != "per_agent":
        return air_rewards([call.events for call in episode.calls], rule)
    by_position = [0.0] * len(episode.calls)
    for agent in {call.agent for call in episode.calls}:
        own = [position for position, call in enumerate(episode.calls) if call.agent == agent]
        airs = air_rewards([episode.calls[position].events for position in own], rule)
        for position, air in zip(own, airs, strict=True):
            by_position[position] = air
    return by_position


def _shares(episode: EpisodeAccount, rule: CreditOptions) -> list[float]:
    count = len(episode.calls)
    if rule.assignment == "discounted":
        return [rule.discount ** (count - 1 - position) for position in range(count)]
    if rule.assignment in ("first_call", "last_call"):
        trainable = [position for position, call in enumerate(episode.calls) if call.trainable]
        credited = trainable[:1] if rule.assignment == "first_call" else trainable[-1:]
        return [1.0 if position in credited else 0.0 for position in range(count)]
    return [1.0] * count
