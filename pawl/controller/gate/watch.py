"""Watch over a version that serves: roll it back if it falls behind what it was promoted for.

What the world does to the rewards it does to the base model's too, which keeps a share of the
episodes for good. So what counts is how far the version is above the base: now, and when it was
promoted. The claim is that this has not fallen by more than the margin.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import exp, log
from typing import Final

import msgspec

from pawl.controller.gate.betting import (
    BELOW,
    MOST_WEALTH,
    ArmCount,
    Block,
    Blocks,
    LateWealth,
    block_size,
)
from pawl.controller.gate.records import BASE, SERVING, ArmFigures, Episode, GateOptions
from pawl.controller.gate.trial import CELLS, Reference, cell_start, lead_of_base, reference_of
from store.records import Arm


class FallWealth:
    """Keep the wealth against that claim; a part of the bets begins with every block."""

    def __init__(self, then: Reference, margin: float) -> None:
        """Begin with what is known of the lead `then`; the margin is a share of the range."""
        self._then = then.logs
        self._now = [LateWealth(cell_start(cell) - margin, BELOW) for cell in range(CELLS)]

    @property
    def value(self) -> float:
        """Return the least product over all differences, at most MOST_WEALTH."""
        pairs = zip(self._then, self._now, strict=True)
        least = min(then + log(now.value) for then, now in pairs)
        return exp(min(least, log(MOST_WEALTH)))

    def update(self, block: Block) -> None:
        """Settle the bets on one block of the episodes since the promotion."""
        for wealth in self._now:
            wealth.update(block)


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

    Attributes:
        has_fallen: whether the version is to be rolled back.
    """

    def __init__(self, reference: Reference, options: GateOptions) -> None:
        """Begin without episodes."""
        self._options = options
        served = 1 - options.canary_share - options.base_share
        self._rewards = Blocks(block_size(served, options.base_share))
        self._fall = FallWealth(reference, options.scaled_margin)
        self._arms: dict[Arm, ArmCount] = {arm: ArmCount(options) for arm in (BASE, SERVING)}
        self.has_fallen = False

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Take in more episodes, in order of their first calls; a canary's are passed over."""
        for episode in episodes:
            if episode.arm in self._arms and not self.has_fallen:
                self._take(episode)

    def watched(self) -> Watched:
        """Return whether the version is to be rolled back."""
        reason = "as far above the base model as when it was promoted, or not shown to be less"
        if self.has_fallen:
            reason = "less far above the base model than when it was promoted"
        return Watched(
            roll_back=self.has_fallen,
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
        self.has_fallen = self._fall.value >= 1 / self._options.mistakes


# A version begins a stretch if the one before it has this many blocks by then.
FEWEST_BLOCKS: Final = 8
# A stretch is compared with so many blocks before it: of longer ago the world was another one.
BLOCKS_BEFORE: Final = 64
# A stretch is watched until this many later ones have begun; the last is watched for good.
STRETCHES: Final = 8
# A stretch with this share of the greatest wealth may be the one that the fall began with. With all
# of it one of 18 simulated falls ended at a version from after it, with a quarter none of 36, and
# with a twentieth none either, but at a version from long before.
MAY_BE: Final = 0.25
# What is said of stretches that stand as they should, and of the one that was found.
HOLDS = "as far above the base model as what served before, or not shown to be less"
FELL = (
    "what serves since version {version} is less far above the base model ({lead:+.3g}) than what"
    " served before it ({before:+.3g})"
)


class Leads:
    """Take the mean of what blocks show, each by its weight."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        """Begin with these blocks."""
        self._total = self._weight = 0.0
        for block in blocks:
            self.add(block)

    def add(self, block: Block) -> None:
        """Count one more block."""
        self._total += block.weight * block.difference
        self._weight += block.weight

    @property
    def mean(self) -> float | None:
        """Return the mean difference, as a share of the reward range; None without any block."""
        return self._total / self._weight if self._weight else None


class Stretch:
    """Compare what serves since a version got the traffic with what served before it.

    Attributes:
        version: the first of those that it is about.
        blocks: how many blocks of episodes its test has seen.
        knows_before: whether there is anything to compare with: a fall is found by this alone.
    """

    def __init__(self, version: int, before: Sequence[Block] | None, options: GateOptions) -> None:
        """Begin with a version; `before` are blocks of what served, None if the base did."""
        self.version = version
        self.blocks = 0
        self.knows_before = before is None or bool(before)
        then = lead_of_base() if before is None else reference_of(before)
        self._fall = FallWealth(then, options.scaled_margin)
        self._before = 0.0 if before is None else Leads(before).mean
        self._since = Leads()
        self._arms: dict[Arm, ArmCount] = {arm: ArmCount(options) for arm in (BASE, SERVING)}
        self._options = options

    @property
    def wealth(self) -> float:
        """Return the wealth against the claim that nothing has fallen since."""
        return self._fall.value

    def count(self, episode: Episode, value: float | None) -> None:
        """Count one more episode of the time since."""
        self._arms[episode.arm].add(episode, value)

    def update(self, block: Block) -> None:
        """Settle the bets on one block of the episodes since the promotion."""
        self.blocks += 1
        self._since.add(block)
        self._fall.update(block)

    def watched(self, fallen: bool, wealth: float) -> Watched:
        """Return what a roll-back rests on; `wealth` is the greatest that any stretch has."""
        width = self._options.width
        leads = [None if one is None else one * width for one in (self._since.mean, self._before)]
        lead, before = (one or 0.0 for one in leads)
        fell = FELL.format(version=self.version, lead=lead, before=before)
        return Watched(
            roll_back=fallen,
            reason=fell if fallen else HOLDS,
            wealth=wealth,
            needed=1 / self._options.mistakes,
            arms={arm: count.figures() for arm, count in self._arms.items()},
            since=self.version,
            lead=leads[0],
            lead_before=leads[1],
        )


class Succession:
    """Follow the episodes of what served, version after version, and of the base, in order.

    What it finds is a function of the episodes alone, in their order. The probability of taking a
    version for the beginning of a fall though neither it nor what served after it was worse than
    what served before, by more than the margin, is at most `mistakes`, whenever it is looked.
    """

    def __init__(self, options: GateOptions, *, after_base: bool = False) -> None:
        """Begin without episodes.

        `after_base` says that the base served before the first version that is watched.
        """
        self._options = options
        self._rewards = Blocks(block_size(1 - options.base_share, options.base_share))
        self._after_base = after_base
        self._places: dict[int, int] = {}
        self._versions: list[int] = []
        self._place = -1
        self._unread = 0
        self._before: deque[Block] = deque(maxlen=BLOCKS_BEFORE)
        self._stretches: deque[Stretch] = deque(maxlen=STRETCHES)
        self._fallen: Watched | None = None

    def follow(self, version: int) -> None:
        """Watch from this version on, the next to serve; other episodes are of what was before."""
        if version not in self._places:
            self._places[version] = len(self._versions)
            self._versions.append(version)

    def leave_unread(self, count: int) -> None:
        """Note that so many of the versions had the traffic before the first episode to be read."""
        self._unread = count

    @property
    def is_blind(self) -> bool:
        """Return whether nothing is known of what served before any stretch that is watched."""
        if not self._stretches:
            return not (self._after_base or self._before)
        return not any(one.knows_before for one in self._stretches)

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Take in more episodes, in order of their first calls; a canary's are passed over."""
        for episode in episodes:
            if episode.arm in (BASE, SERVING) and self._fallen is None:
                self._take(episode)

    @property
    def has_fallen(self) -> bool:
        """Return whether anything is to be rolled back."""
        return self._fallen is not None

    def watched(self) -> Watched:
        """Return whether anything is to be rolled back, and since which version."""
        if self._fallen is not None:
            return self._fallen
        if not self._stretches:
            return Watched(False, HOLDS, 1.0, 1 / self._options.mistakes, {})
        most = max(self._stretches, key=lambda one: one.wealth)
        return most.watched(False, most.wealth)

    def _take(self, episode: Episode) -> None:
        place = self._places.get(episode.version, -1) if episode.arm == SERVING else -1
        # A proxy that hears of it late may give an episode to the version before it.
        if place > self._place:
            # One that had the traffic and no episode may be what those after it are worse for.
            first = min(place, max(self._place + 1, self._unread))
            self._place = place
            self._settle(self._rewards.close())
            self._begin(self._versions[first])
        value = self._options.scaled(episode)
        for stretch in self._stretches:
            stretch.count(episode, value)
        if value is not None:
            self._settle(self._rewards.add(episode.arm == SERVING, episode.family, value))

    def _begin(self, version: int) -> None:
        """Begin a stretch with a version, unless there is too little of the one before it."""
        if self._stretches and self._stretches[-1].blocks < FEWEST_BLOCKS:
            return
        is_first = not self._stretches
        before = None if is_first and self._after_base else tuple(self._before)
        self._stretches.append(Stretch(version, before, self._options))

    def _settle(self, block: Block | None) -> None:
        if block is None or self._fallen is not None:
            return
        self._before.append(block)
        for stretch in self._stretches:
            stretch.update(block)
        most = max((one.wealth for one in self._stretches), default=0.0)
        if most >= 1 / self._options.mistakes:
            self._fallen = self._beginning(most).watched(True, most)

    def _beginning(self, most: float) -> Stretch:
        """Return the earliest stretch that the fall may have begun with.

        It is the one with the greatest wealth, or one before it that has enough of that: what
        serves again is to be from before the fall.
        """
        return next(one for one in self._stretches if one.wealth >= MAY_BE * most)
