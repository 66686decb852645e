"""Watch over a version that serves: roll it back if it falls behind what it was promoted for.

What the world does to the rewards it does to the base model's too, which keeps a share of the
episodes for good. So what counts is how far the version is above the base: now, and when it was
promoted. The claim is that this has not fallen by more than the margin (`fall.py`).
"""

from collections.abc import Iterable

import msgspec

from pawl.steward.gate.blocks import Blocks, block_size
from pawl.steward.gate.counts import ArmCount
from pawl.steward.gate.fall import FallWealth
from pawl.steward.gate.records import BASE, SERVING, Arm, ArmFigures, Episode, GateOptions
from pawl.steward.gate.reference import Reference


class Watched(msgspec.Struct, frozen=True):
    """Say whether a version is to be rolled back, and what that rests on (JSON as it is).

    `since` is the first of several that served one after the other, and are to be rolled back with
    it; of these, `lead` is how far they were above the base model, and `lead_before` how far what
    served before them was, in units of the reward.
    """

    roll_back: bool
    reason: str
    wealth: float
    needed: float
    arms: dict[str, ArmFigures]
    since: int | None = None
    lead: float | None = None
    lead_before: float | None = None


class Watch:
    """Follow the episodes of one serving version and of the base, in order, since it serves.

    The work is that of the new episodes. The probability of rolling back one that has not fallen
    is at most `mistakes` over all the time that it serves; one that falls after long is found as
    well, since a part of the bets begins with every block.
    """

    def __init__(self, reference: Reference, options: GateOptions) -> None:
        """Begin without episodes."""
        self._options = options
        served = 1 - options.canary_share - options.base_share
        self._rewards = Blocks(block_size(served, options.base_share))
        self._fall = FallWealth(reference, options.scaled_margin)
        self._arms: dict[Arm, ArmCount] = {arm: ArmCount(options) for arm in (BASE, SERVING)}
        self._fallen = False

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Take in more episodes, in order of their first calls; a canary's are passed over."""
        for episode in episodes:
            if episode.arm in self._arms and not self._fallen:
                self._take(episode)

    @property
    def has_fallen(self) -> bool:
        """Return whether the version is to be rolled back."""
        return self._fallen

    def watched(self) -> Watched:
        """Return whether the version is to be rolled back."""
        reason = "as far above the base model as when it was promoted, or not shown to be less"
        if self._fallen:
            reason = "less far above the base model than when it was promoted"
        return Watched(
            roll_back=self._fallen,
            reason=reason,
            wealth=self._fall.value,
            needed=1 / self._options.mistakes,
            arms={arm: count.figures() for arm, count in self._arms.items()},
        )

    def _take(self, episode: Episode) -> None:
        value = self._options.scaled(episode)
        self._arms[episode.arm].add(episode, value)
        if value is None:
            return
        block = self._rewards.add(episode.arm == SERVING, episode.family, value)
        if block is None:
            return
        self._fall.update(block)
        self._fallen = self._fall.value >= 1 / self._options.mistakes
