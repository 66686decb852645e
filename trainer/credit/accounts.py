"""Extract the only facts about an episode that can change its credit (pure)."""

from store.read.facts import MatchedEvent, has_failed, matched_events
from store.records import Episode, Record, TransitionRow
from store.values.rewards import UNSCORED, Reward, RewardRule, reward_of
from store.values.tokens import unpack_ids


class CallAccount(Record, frozen=True, kw_only=True):
    """Hold the facts about one call that count for credit.

    `reason` says why it is not trainable (None if it is). `sampled` is the number of its
    sampled tokens. `earned` is the reward given to this call alone.
    """

    agent: str
    trainable: bool
    reason: str | None
    sampled: int
    earned: Reward = UNSCORED
    events: tuple[MatchedEvent, ...] = ()


class EpisodeAccount(Record, frozen=True, kw_only=True):
    """Hold the facts about one episode that count for credit.

    `earned` is the reward given to the whole episode. `withheld` says why the episode is not
    trained although the others of its group are compared with it (None: nothing forbids it).
    `excluded` says why it is not even compared. `earlier` marks an episode that an earlier update
    has consumed: the group is compared with it, and it is not trained again.
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
        calls=tuple(_call(call, rule) for call in episode.calls),
        withheld=withheld,
        excluded=episode.quarantined_reason,
        earlier=earlier,
    )


def _call(call: TransitionRow, rule: RewardRule) -> CallAccount:
    return CallAccount(
        agent=call.agent,
        trainable=call.trainable,
        reason=call.reason,
        sampled=len(unpack_ids(call.tokens.sampled_ids)),
        earned=reward_of(call.feedback, rule),
        events=matched_events(call),
    )
