"""What each call of an episode is paid, under the rule's assignment (pure).

`identical`: the episode's return, each call. `per_agent`: the agent's own: the mean of what its
calls were given singly (the episode's reward where none was), and AIR of its own tools.
`discounted`: the episode's, times `discount` for each call that came after. `first_call`,
`last_call`: the episode's, to its first or last trainable call alone. `call`: what a call was
given singly, and the episode's reward where it was given nothing. A reward given to a single
call counts under `per_agent` and `call` only: elsewhere it would be added to what it is part of.
"""

from collections.abc import Sequence

from store.records import Record
from trainer.air import air_rewards
from trainer.credit.accounts import EpisodeAccount
from trainer.means import mean_of
from trainer.recipe_parts import CreditPart


class CallReturn(Record, frozen=True, kw_only=True):
    """A call's pay before it is shared out, and the call's `share` of it.

    What is compared with other episodes is `value`; the call gets `share` of it, and of the
    advantage that comes of it.
    """

    final: float | None
    air: float
    share: float

    @property
    def value(self) -> float | None:
        """Final reward and AIR; None where nobody scored it."""
        return None if self.final is None else self.final + self.air

    @property
    def r_final(self) -> float | None:
        """The call's part of the final reward."""
        return None if self.final is None else _part(self.share, self.final)

    @property
    def r_air(self) -> float:
        """The call's part of AIR."""
        return _part(self.share, self.air)

    @property
    def r_total(self) -> float | None:
        """r_final + r_air; None where there is no r_final."""
        return None if self.r_final is None else self.r_final + self.r_air


class EpisodeReturn(Record, frozen=True, kw_only=True):
    """An episode's return: the mean over its calls, before it is shared out among them."""

    r_final: float | None
    r_air: float

    @property
    def r_total(self) -> float | None:
        """r_final + r_air; None where there is no r_final."""
        return None if self.r_final is None else self.r_final + self.r_air


def call_returns(episode: EpisodeAccount, rule: CreditPart) -> list[CallReturn]:
    """What each call is paid, in the order of calls."""
    shares = _shares(episode, rule)
    return [
        CallReturn(final=final, air=air, share=share)
        for final, air, share in zip(
            _finals(episode, rule), _airs(episode, rule), shares, strict=True
        )
    ]


def episode_return(returns: Sequence[CallReturn]) -> EpisodeReturn:
    """The return of the episode whose calls are paid so."""
    finals = [paid.final for paid in returns if paid.final is not None]
    airs = [paid.air for paid in returns]
    return EpisodeReturn(
        r_final=mean_of(finals) if finals else None, r_air=mean_of(airs) if airs else 0.0
    )


def _part(share: float, whole: float) -> float:
    return share * whole if share else 0.0


def _finals(episode: EpisodeAccount, rule: CreditPart) -> list[float | None]:
    """The final reward of each call; a failed episode that nobody scored has `failed_reward`."""
    whole = episode.reward
    if whole is None and episode.failed:
        whole = rule.failed_reward
    if episode.set_aside is not None:
        return [None] * len(episode.calls)
    single: list[float | None] = [None] * len(episode.calls)
    if rule.assignment == "call":
        single = [call.reward for call in episode.calls]
    elif rule.assignment == "per_agent":
        of_agent = {call.agent: _agents_own(episode, call.agent) for call in episode.calls}
        single = [of_agent[call.agent] for call in episode.calls]
    return [whole if reward is None else reward for reward in single]


def _agents_own(episode: EpisodeAccount, agent: str) -> float | None:
    given = [
        call.reward for call in episode.calls if call.agent == agent and call.reward is not None
    ]
    return mean_of(given) if given else None


def _airs(episode: EpisodeAccount, rule: CreditPart) -> list[float]:
    if rule.assignment != "per_agent":
        return air_rewards([call.events for call in episode.calls], rule)
    found = [0.0] * len(episode.calls)
    for agent in {call.agent for call in episode.calls}:
        own = [place for place, call in enumerate(episode.calls) if call.agent == agent]
        airs = air_rewards([episode.calls[place].events for place in own], rule)
        for place, air in zip(own, airs, strict=True):
            found[place] = air
    return found


def _shares(episode: EpisodeAccount, rule: CreditPart) -> list[float]:
    count = len(episode.calls)
    if rule.assignment == "discounted":
        return [rule.discount ** (count - 1 - place) for place in range(count)]
    if rule.assignment in ("first_call", "last_call"):
        able = [place for place, call in enumerate(episode.calls) if call.trainable]
        paid = able[:1] if rule.assignment == "first_call" else able[-1:]
        return [1.0 if place in paid else 0.0 for place in range(count)]
    return [1.0] * count
