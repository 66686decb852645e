"""Replay the watch over a version that turned bad, to find when its evidence sufficed.

The steward acts on what its watch says at a look. The same watch, given the same episodes at each
second since, says from which second on a steward that looks all the time would have acted.
"""

from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.trials.ledger import Begun
from pawl.steward.watches import OnWatch
from store.read.standing import Gated, Promotion
from store.records import Record
from store.versions import PolicyEvent

STEP: Final = timedelta(seconds=1)


class Turned(Record, frozen=True, kw_only=True):
    """Hold what came of a version that turned bad while it served.

    Attributes:
        serves: what serves in its place.
        reason: why it was rolled back, as its event says.
        seconds: from when it turned bad to its roll-back.
        waited: of these, those since the evidence sufficed; None if it never did.
        episodes: those that it was given since it turned bad.
        own: their mean reward.
        base: the mean reward of the base model's since then.
        before: its mean reward as it served, until it turned bad.
    """

    serves: str
    reason: str
    seconds: float
    waited: float | None
    episodes: int
    own: float | None
    base: float | None
    before: float | None


async def sufficed_at(
    engine: AsyncEngine, stands: Gated, promoted: Promotion, until: datetime
) -> datetime | None:
    """Return the first second at which the watch rolls back what serves, or None if none does.

    If it is less than a second before `until`, `until` is returned.

    Args:
        engine: the ledger's.
        stands: where the policy stood before the version turned bad; the search begins then.
        promoted: how the version got the traffic.
        until: the last moment that is asked.

    Raises:
        msgspec.ValidationError: the promotion has no evidence to watch by.
    """
    watch = OnWatch(stands, promoted)
    now = stands.now
    async with engine.connect() as connection:
        while True:
            found = await watch.look(connection, now)
            if found is not None and found.roll_back:
                return now
            if now >= until:
                return None
            # The last look is at the end itself: the steward's own may have been a moment before.
            now = min(now + STEP, until)


def turned_of(
    version: int,
    end: PolicyEvent,
    serves: str,
    since: datetime,
    sufficed: datetime | None,
    begun: list[Begun],
) -> Turned:
    """Return what came of the version (pure); `end` is its roll-back, `since` when it turned."""
    own = [one for one in begun if (one.arm, one.version) == ("serving", version)]
    after = [one for one in own if one.at >= since]
    base = [one for one in begun if one.arm == "base" and since <= one.at < end.at]
    return Turned(
        serves=serves,
        reason=end.reason,
        seconds=(end.at - since).total_seconds(),
        waited=None if sufficed is None else (end.at - sufficed).total_seconds(),
        episodes=len(after),
        own=_mean(after),
        base=_mean(base),
        before=_mean([one for one in own if one.at < since]),
    )


def _mean(begun: list[Begun]) -> float | None:
    rewards = [one.reward for one in begun if one.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
