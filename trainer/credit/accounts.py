"""Extract the only facts about an episode that can change its credit (pure)."""

from collections.abc import Sequence
from typing import Final

from store.read.facts import MatchedEvent, has_failed, matched_events
from store.records import REWARD, Episode, Feedback, Record, TransitionRow
from store.values.tokens import unpack_ids

# Rewards are clipped to ± this value, so that their squares and sums stay finite.
LARGEST_REWARD: Final = 1e100


class CallAccount(Record, frozen=True, kw_only=True):
    """Hold the facts about one call that count for credit.

    `reason` says why it is not trainable (None if it is). `sampled` is the number of its
    sampled tokens. `reward` is the reward given to this call alone, None if there is none.
    """

    agent: str
    trainable: bool
    reason: str | None
    sampled: int
    reward: float | None
    events: tuple[MatchedEvent, ...] = ()


class EpisodeAccount(Record, frozen=True, kw_only=True):
    """Hold the facts about one episode that count for credit.

    `reward` is the reward given to the whole episode, None if there is none. `withheld` says
    why the episode is not trained although the others of its group are compared with it
    (None: nothing forbids it). `excluded` says why it is not even compared. `earlier` marks
    an episode that an earlier update has consumed: the group is compared with it, and it is
    not trained again.
    """

    task: str | None
    failed: bool
    reward: float | None
    calls: tuple[CallAccount, ...]
    withheld: str | None = None
    excluded: str | None = None
    earlier: bool = False


def newest(feedback: Sequence[Feedback], metric: str) -> float | None:
    """Return the newest value of `metric`, or None if there is no feedback on it.

    Of several values with the same time the lowest counts: the result must not depend on the
    order in which feedback arrived.
    """
    candidates = [(item.at, -item.value) for item in feedback if item.metric == metric]
    return -max(candidates)[1] if candidates else None


def current_reward(feedback: Sequence[Feedback]) -> float | None:
    """Return the reward that counts, clipped to ±LARGEST_REWARD, or None if there is none."""
    value = newest(feedback, REWARD)
    return None if value is None else max(-LARGEST_REWARD, min(LARGEST_REWARD, value))


def account_of(
    episode: Episode, *, withheld: str | None = None, earlier: bool = False
) -> EpisodeAccount:
    """Return the account of an episode that was read from the store."""
    return EpisodeAccount(
        task=episode.task,
        failed=has_failed(episode),
        reward=current_reward(episode.feedback),
        calls=tuple(_call(call) for call in episode.calls),
        withheld=withheld,
        excluded=episode.quarantined_reason,
        earlier=earlier,
    )


def _call(call: TransitionRow) -> CallAccount:
    return CallAccount(
        agent=call.agent,
        trainable=call.trainable,
        reason=call.reason,
        sampled=len(unpack_ids(call.tokens.sampled_ids)),
        reward=current_reward(call.feedback),
        events=matched_events(call),
    )
