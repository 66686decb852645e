"""What of an episode counts for credit: nothing else of it can change what is paid (pure)."""

from collections.abc import Sequence
from typing import Final

from store.records import REWARD, Episode, Feedback, Record, TransitionRow
from store.records import has_failed as call_has_failed
from store.tokens import unpack_ids
from trainer.air import AskedEvent, asked_events

# A reward past it counts as it: squares and their sums must stay finite.
LARGEST_REWARD: Final = 1e100


class CallAccount(Record, frozen=True, kw_only=True):
    """A call: `reason` says why it is not trainable, `reward` what was said of it alone."""

    agent: str
    trainable: bool
    reason: str | None
    sampled: int
    reward: float | None
    events: tuple[AskedEvent, ...] = ()


class EpisodeAccount(Record, frozen=True, kw_only=True):
    """An episode: `reward` is what was said of all of it.

    `withheld` says why it is not trained whatever it earned; it counts in what others are
    compared with. `set_aside` says why it does not even do that. `earlier`: an update before
    this one has spent it, and the group is compared with it all the same.
    """

    task: str | None
    failed: bool
    reward: float | None
    calls: tuple[CallAccount, ...]
    withheld: str | None = None
    set_aside: str | None = None
    earlier: bool = False


def newest(statements: Sequence[Feedback], metric: str) -> float | None:
    """The value of the newest statement of `metric`, of equally new ones the lowest.

    None if there is none.
    """
    said = [(one.at, -one.value) for one in statements if one.metric == metric]
    return -max(said)[1] if said else None


def standing_reward(statements: Sequence[Feedback]) -> float | None:
    """The reward that counts, within ±LARGEST_REWARD; None if there is none."""
    value = newest(statements, REWARD)
    return None if value is None else max(-LARGEST_REWARD, min(LARGEST_REWARD, value))


def has_failed(episode: Episode) -> bool:
    """Whether the episode's last call did not come to a proper reply."""
    if not episode.calls:
        return False
    last = episode.calls[-1]
    return call_has_failed(last.status, last.http_status)


def account_of(
    episode: Episode, *, withheld: str | None = None, earlier: bool = False
) -> EpisodeAccount:
    """The account of an episode as the store gives it."""
    return EpisodeAccount(
        task=episode.task,
        failed=has_failed(episode),
        reward=standing_reward(episode.feedback),
        calls=tuple(_call(call) for call in episode.calls),
        withheld=withheld,
        set_aside=episode.quarantined_reason,
        earlier=earlier,
    )


def _call(call: TransitionRow) -> CallAccount:
    return CallAccount(
        agent=call.agent,
        trainable=call.trainable,
        reason=call.reason,
        sampled=len(unpack_ids(call.tokens.sampled_ids)),
        reward=standing_reward(call.feedback),
        events=asked_events(call),
    )
