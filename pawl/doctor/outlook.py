"""Forecast when a policy learns, from its episodes so far (pure)."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from store.claim_query import ClaimRule
from store.read.health import EpisodeCounts
from store.records import Record

NO_REWARD, ALIKE, QUARANTINED = "without a reward", "all alike", "quarantined"
# Rewarded episodes until a version was first seen to be better than the base model: on the packaged
# task, and on the slowest of six others (docs/experiments.md, strangers).
FIRST_SEEN: Final = (250, 1500)
SHORTEST_TIME: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)


class Outlook(Record, frozen=True, kw_only=True):
    """How many episodes recorded within `time` count towards an update, and when the next comes.

    `unused` counts the other episodes by reason. `next_update` is the time until there are enough
    for an update; zero if there are. `first_seen` is the shortest and the longest time until a
    version may be seen to be better than the base model; None if one was trained already, or if
    learning needs no rewards.
    """

    recorded: int
    usable: int
    unused: Mapping[str, int]
    time: timedelta
    next_update: timedelta
    first_seen: tuple[timedelta, timedelta] | None = None

    @property
    def remedy(self) -> str:
        """Return how to get more usable episodes."""
        most = max(self.unused, key=lambda why: self.unused[why], default=None)
        if most == NO_REWARD:
            return (
                "send rewards for more runs, or let `pawl judge` score them, such as by what the"
                " user says next, or by the tests that the agent ran (docs/howto/first-week.md)"
            )
        if most == ALIKE:
            return "give tasks that succeed sometimes, or rewards between all and nothing"
        return "wait" if most is None else "name each run (docs/howto/rewards.md)"

    def __str__(self) -> str:
        per, length = ("a day", DAY) if self.time >= DAY else ("an hour", SHORTEST_TIME)
        usable, recorded = (
            f"{number * (length / self.time):.0f}" for number in (self.usable, self.recorded)
        )
        unused = ", ".join(f"{number} {why}" for why, number in self.unused.items())
        because = f" (of {self.recorded}: {unused})" if unused else ""
        update = f"in {describe_time(self.next_update)}" if self.next_update else "now"
        text = f"about {usable} of {recorded} episodes {per} count towards an update{because};"
        text += f" the next update {update}"
        if self.first_seen is not None:
            soonest, latest = map(describe_time, self.first_seen)
            text += (
                f"; a first difference in {soonest} to {latest.removeprefix('about ')}, if it takes"
                f" {FIRST_SEEN[0]} episodes as the packaged task does, or {FIRST_SEEN[1]} as the"
                " slowest of six others"
            )
        return text


def outlook_of(
    counts: EpisodeCounts, rule: ClaimRule, updates: float, now: datetime, *, is_untrained: bool
) -> Outlook | None:
    """Return the outlook of a policy, or None if none of its episodes is usable so far.

    `updates` is how many updates the waiting episodes suffice for; `is_untrained` means that the
    policy has no version yet.
    """
    alike = counts.alike if rule.needs_spread else 0
    needs_rewards = rule.finished_after_s is None
    usable = counts.scored - alike if needs_rewards else counts.ended
    if usable <= 0 or counts.first_at is None:
        return None
    unused = {
        NO_REWARD: counts.episodes - counts.scored if needs_rewards else 0,
        ALIKE: alike,
        QUARANTINED: counts.quarantined,
    }
    time = max(now - counts.first_at, SHORTEST_TIME)
    missing = max(0.0, 1 - updates) * rule.episodes_needed
    return Outlook(
        recorded=counts.episodes + counts.quarantined,
        usable=usable,
        unused={why: number for why, number in unused.items() if number},
        time=time,
        next_update=missing * time / usable,
        first_seen=(FIRST_SEEN[0] * time / counts.scored, FIRST_SEEN[1] * time / counts.scored)
        if is_untrained and needs_rewards
        else None,
    )


def describe_time(time: timedelta) -> str:
    """Return a forecast in words, such as `about 3 hours`."""
    seconds = time.total_seconds()
    units = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    unit, length = next((one for one in units if seconds >= 1.5 * one[1]), units[-1])
    number = max(1, round(seconds / length))
    return f"about {number} {unit}{'s' if number > 1 else ''}"
