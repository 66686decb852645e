"""Compare a new version with an old one by what came of their episodes, and come to a verdict.

This is the whole test: a canary against what serves, what serves against its control, and both
versions of an evaluation. It is a function of the episodes in their order, however often somebody
looks (docs/explanation/gate.md). It does no I/O and has no clock.
"""

from collections import deque
from collections.abc import Sequence
from math import isnan, sqrt
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from pawl.controller.eprocess import (
    ABOVE,
    BELOW,
    Block,
    Blocks,
    ChangeDetector,
    EProcess,
    Side,
    block_size,
    bound,
)
from pawl.controller.own_past import OwnPast

if TYPE_CHECKING:
    from trainer.recipes.recipe import PublishOptions

Kind = Literal["better", "worse"]

# What a sum of floats may come to past an end of its range, as a share of the width.
ROUNDING: Final = 1e-9
# The share of episodes by which a new version must go wrong more often to be worse for it.
GUARD_MARGIN: Final = 0.05
# A guard's evidence that keeps a version without proof from the traffic at the end of its time.
SUSPICIOUS: Final = 2.0
# So many episodes' worth of information decide a trial whose version is better by 0.1 or so: n·m/(n
# + m) of the arms' episodes, rewards of 0 or 1.
INFORMATION: Final = 200.0
# So many let the control move on; the newest of half as many again say whether it may.
RENEWAL: Final = 64.0
# A version that is as good is called worse by a watch once in so many episodes at most: a week of
# one a second.
FALSE_ONCE_IN: Final = 600_000
# Families of tasks that are compared each by itself, the first ones; and the information about one
# that its gain counts from.
MOST_JUDGED: Final = 64
KNOWN_FAMILY: Final = 10.0
# An episode is slow if it takes this many times the median of the old version's.
SLOW: Final = 2.0
# The median is of the newest TIMES episodes of the old version, and is first taken of FIRST_TIMES.
TIMES: Final = 200
FIRST_TIMES: Final = 20


class ComparedEpisode(msgspec.Struct, frozen=True):
    """Hold what a comparison needs of one episode.

    Attributes:
        family: what its task is one of; tasks of one family are scored alike.
        reward: its reward, or None if nobody scored it.
        failed: whether a request of it failed.
        malformed: whether a tool call of it was malformed; None if it called no tool.
        seconds: how long its calls took, in a unit that both versions share; None if unknown.
        version: the version that it was given, where several follow each other.
    """

    family: str
    reward: float | None
    failed: bool = False
    malformed: bool | None = None
    seconds: float | None = None
    version: int = 0


class ArmFigures(msgspec.Struct, frozen=True):
    """Count what was seen of one version; `mean` is of scored episodes, in units of the reward."""

    episodes: int
    unscored: int
    failed: int
    clipped: int
    mean: float | None


class PartFigures(msgspec.Struct, frozen=True):
    """Compare both versions in one part: means of 0 to 1, and how much speaks against the new.

    The part is a way to go wrong, whose means are shares of episodes, or a family of tasks.
    """

    name: str
    new: float | None
    old: float | None
    against: float
    needed: float


class Figures(msgspec.Struct, frozen=True):
    """Hold all that a verdict rests on (JSON as it is).

    Attributes:
        new: what was seen of the new version.
        old: what was seen of the old one.
        difference: estimate of new − old, in units of the reward; None before the first block.
        lower: bound of the difference that holds at all times with probability 1 − `mistakes`.
        upper: bound likewise, with probability 1 − `mistakes`/2.
        better: evidence against "worse by the margin or more"; at `better_needed` it is no worse.
        worse: evidence against "as good"; at `worse_needed` it is worse.
        guards: failed requests, malformed tool calls, slow episodes.
        families: families of tasks, if there are several.
        fall: by how much the new version's rewards fell below what they were, if they did.
    """

    new: ArmFigures
    old: ArmFigures
    difference: float | None
    lower: float
    upper: float
    better: float
    better_needed: float
    worse: float
    worse_needed: float
    guards: list[PartFigures]
    families: list[PartFigures] = []
    fall: float | None = None


class Verdict(msgspec.Struct, frozen=True):
    """Say what was shown of the new version, and why, in a sentence for people."""

    kind: Kind
    reason: str


class _Arm:
    """Count the episodes of one version as they come."""

    def __init__(self) -> None:
        self.episodes = self.failed = self.clipped = self.scored = 0
        self.total = 0.0


class _Slowness:
    """Tell slow episodes from others by the median of the old version's episodes before."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=TIMES)
        self._bar: float | None = None
        self._seen = 0

    def read(self, is_new: bool, episode: ComparedEpisode) -> bool | None:
        """Return whether an episode is slow; None if its time, or the median, is not known."""
        if episode.seconds is None:
            return None
        # Anew for each block at most: no episode moves its own bar.
        if self._seen % FIRST_TIMES == 0 and len(self._times) >= FIRST_TIMES:
            self._bar = SLOW * median(self._times)
        self._seen += 1
        if not is_new:
            self._times.append(episode.seconds)
        return None if self._bar is None else episode.seconds > self._bar


class _Part:
    """Bet that the new version's values of one part are on `side` of the old one's by `null`."""

    def __init__(
        self, name: str, size: int, evidence: type[EProcess], null: float, side: Side
    ) -> None:
        self.name = name
        self.blocks = Blocks(size)
        self.against = evidence(null, side)
        self.weight = self._told = 0.0
        self._sums = {True: (0.0, 0), False: (0.0, 0)}

    def add(self, is_new: bool, family: str, value: float) -> None:
        total, count = self._sums[is_new]
        self._sums[is_new] = (total + value, count + 1)
        self.blocks.add(is_new, family, value)

    def settle(self) -> None:
        block = self.blocks.close()
        if block is not None:
            self.against.update(block)
            self.weight += block.weight
            self._told += block.weight * block.difference

    @property
    def difference(self) -> float:
        return self._told / self.weight if self.weight else 0.0

    def mean(self, is_new: bool) -> float | None:
        total, count = self._sums[is_new]
        return total / count if count else None

    def figures(self, needed: float) -> PartFigures:
        means = self.mean(True), self.mean(False)
        return PartFigures(self.name, *means, self.against.value, needed)


class Comparison:
    """Follow the episodes of a new version and of an old one, and come to a verdict.

    The probability of calling a new version worse that is as good is at most `mistakes`: half of it
    for the reward, the other half in equal parts for the guards. That of calling one no worse that
    is worse by the margin or more is at most `mistakes`. After a verdict later episodes are counted
    and decide nothing more. While a guard's evidence is against the new version, if only by chance,
    it is not called no worse.

    One that watches compares the versions that follow each other, as one arm, with their control,
    and finds when that has become worse. It calls one worse that is as good once in FALSE_ONCE_IN
    episodes.

    Attributes:
        is_watch: whether it watches.
        verdict: what was shown of the new version; None while nothing is.
        trade: on which family of tasks the new version loses more than it gains on any other; None
            if on none. With `undecided = "keep"` it is worse for that.
    """

    def __init__(
        self,
        rule: "PublishOptions",
        *,
        new_share: float = 0.5,
        old_share: float = 0.5,
        watches: bool = False,
    ) -> None:
        """Begin without episodes; the shares of live ones size the blocks, and decide nothing."""
        self._rule = rule
        self._low, high = rule.reward_range
        self._width = high - self._low
        self._size = block_size(new_share, old_share)
        self._evidence = ChangeDetector if watches else EProcess
        self._rewards = Blocks(self._size)
        self._has_rewards = False
        # A watch keeps those that decide now, and the others all.
        self._blocks = deque[Block]()
        self.blocks = 0
        self._better = EProcess(-rule.margin / self._width, ABOVE)
        self._worse = self._evidence(0.0, BELOW)
        self._slowness = _Slowness()
        self._guards = [
            _Part(name, self._size, self._evidence, GUARD_MARGIN, ABOVE)
            for name in ("failed requests", "malformed tool calls", "slow episodes")
        ]
        self._families: dict[str, _Part] = {}
        self._arms = {True: _Arm(), False: _Arm()}
        self._better_needed = 1 / rule.mistakes
        self._worse_needed = FALSE_ONCE_IN / self._size if watches else 2 / rule.mistakes
        self._guard_needed = len(self._guards) * self._worse_needed
        # What the blocks that decide say, and all that there ever were.
        self._total = self._weight = self._told = self._known = 0.0
        self._bounds = (0, -1.0, 1.0)
        self.is_watch = watches
        self._own_past = OwnPast()
        # Of each new version, how much was known when its first episode came.
        self._known_before: dict[int, float] = {}
        self.verdict: Verdict | None = None
        self.trade: str | None = None

    def add_past(self, episode: ComparedEpisode) -> None:
        """Take in an episode of what served before the control lost the traffic."""
        value = self._value(episode)
        if value is not None and not episode.failed:
            self._own_past.add((episode.family, value), is_past=True)

    def add(self, is_new: bool, episode: ComparedEpisode) -> None:
        """Take in one live episode, after all those that counted before it."""
        if is_new:
            self._known_before.setdefault(episode.version, self._known)
        self._take(is_new, episode)
        parts = *self._guards, *filter(None, [self._families.get(episode.family)])
        full = [part for part in parts if part.blocks.is_full]
        for part in full:
            part.settle()
        if self._rewards.is_full:
            self._close()
            self._judge()
        elif full:
            self._judge()

    def add_pair(self, new: Sequence[ComparedEpisode], old: Sequence[ComparedEpisode]) -> None:
        """Take in what both versions made of one task: a block of its own.

        A task of which one version has no scored episode says nothing about the reward.
        """
        for is_new, episodes in ((True, new), (False, old)):
            for episode in episodes:
                self._take(is_new, episode)
        for part in (*self._guards, *self._families.values()):
            part.settle()
        self._close()
        self._judge()

    @property
    def difference(self) -> float | None:
        """Return the estimate of new − old, in units of the reward; None before the first block."""
        return self._width * self._total / self._weight if self._weight else None

    @property
    def fall(self) -> float | None:
        """Return by how much the new arm's rewards fell below their own past, as a share of 1.

        None: they did not. What was compared before they did says nothing for what serves now.
        """
        return self._own_past.fall

    @property
    def tells_against(self) -> bool:
        """Return whether as much is known as decides a trial, and the new version is lower."""
        return self.is_enough and self._told < 0

    @property
    def is_enough(self) -> bool:
        """Return whether as much is known as decides a trial."""
        return self._known >= INFORMATION

    @property
    def is_in_line(self) -> bool:
        """Return whether enough is known for the control to move on, and nothing is against it."""
        return self._weight >= RENEWAL and not self.points_to_harm

    @property
    def next_control(self) -> int | None:
        """Return the newest version that half of what is known came after; None if there is none.

        A version that has fallen since is not among them: half suffices to find that.
        """
        known = [
            version
            for version, before in self._known_before.items()
            if self._known - before >= RENEWAL / 2
        ]
        return max(known) if known and self.is_in_line else None

    @property
    def points_to_harm(self) -> bool:
        """Return whether what was seen so far, however little, speaks against the new version.

        An expected difference below 0 does; of a canary, and of what is watched, only below half
        the margin, as it is compared on. So does a guard with some evidence.
        """
        is_compared_on = self._rule.mode == "canary" or self.is_watch
        least = -self._rule.margin / 2 if is_compared_on else 0.0
        bar = sqrt(self._guard_needed) if self.is_watch else SUSPICIOUS
        is_guarded = any(guard.against.value >= bar for guard in self._guards)
        return is_guarded or (self.difference or 0.0) < least

    def figures(self, renewed: float = 1.0) -> Figures:
        """Return all that the verdict rests on.

        The bounds are taken anew once there are `renewed` times the blocks of the last time.
        """
        count = self.blocks
        if count > renewed * self._bounds[0]:
            lower = bound(self._blocks, self._rule.mistakes, ABOVE)
            upper = bound(self._blocks, self._rule.mistakes / 2, BELOW)
            self._bounds = (count, lower, upper)
        return Figures(
            new=self._figures_of(True),
            old=self._figures_of(False),
            difference=self.difference,
            lower=self._bounds[1] * self._width,
            upper=self._bounds[2] * self._width,
            better=self._better.value,
            better_needed=self._better_needed,
            worse=self._worse.value,
            worse_needed=self._worse_needed,
            guards=[guard.figures(self._guard_needed) for guard in self._guards],
            families=[one.figures(self._family_needed) for one in self._families.values()]
            if len(self._families) > 1
            else [],
            fall=self.fall,
        )

    def _figures_of(self, is_new: bool) -> ArmFigures:
        arm = self._arms[is_new]
        mean = self._low + self._width * arm.total / arm.scored if arm.scored else None
        return ArmFigures(arm.episodes, arm.episodes - arm.scored, arm.failed, arm.clipped, mean)

    def _take(self, is_new: bool, episode: ComparedEpisode) -> None:
        """Count an episode, and put it into the open blocks.

        One that failed and has no reward counts as the lowest; any other without one is unscored,
        as is one whose reward is not a number.
        """
        wrong = (episode.failed, episode.malformed, self._slowness.read(is_new, episode))
        for guard, is_wrong in zip(self._guards, wrong, strict=True):
            if is_wrong is not None:
                guard.add(is_new, episode.family, float(is_wrong))
        arm = self._arms[is_new]
        arm.episodes += 1
        arm.failed += episode.failed
        value = self._value(episode)
        if value is None:
            return
        if episode.reward is not None and not isnan(episode.reward):
            place = (episode.reward - self._low) / self._width
            arm.clipped += not -ROUNDING <= place <= 1 + ROUNDING
            self._has_rewards = True
        arm.scored += 1
        arm.total += value
        self._rewards.add(is_new, episode.family, value)
        family = self._families.get(episode.family)
        if family is None and len(self._families) < MOST_JUDGED:
            family = _Part(episode.family, self._size, self._evidence, 0.0, BELOW)
            self._families[episode.family] = family
        if family is not None:
            family.add(is_new, episode.family, value)
        # In an outage all fail, whatever serves.
        if is_new and self.is_watch and not episode.failed and self.fall is None:
            self._own_past.add((episode.family, value))
            if self.fall is not None:
                self._blocks.clear()
                self._total = self._weight = 0.0
                self._rewards.size = block_size(MOST_SHARE, MOST_SHARE)

    def _value(self, episode: ComparedEpisode) -> float | None:
        """Return the reward as a share of its range; the lowest for one that only failed."""
        if episode.reward is None or isnan(episode.reward):
            return 0.0 if episode.failed else None
        return min(max((episode.reward - self._low) / self._width, 0.0), 1.0)

    def _close(self) -> None:
        """Settle the bets on the open block of rewards.

        One in which every episode failed without a reward, whatever its version, says nothing: so
        it is in an outage.
        """
        block = self._rewards.close()
        self._settle(block if self._has_rewards else None)
        self._has_rewards = False

    def _settle(self, block: Block | None) -> None:
        if block is not None:
            self._blocks.append(block)
            self.blocks += 1
            self._told += block.weight * block.difference
            self._known += block.weight
            self._total += block.weight * block.difference
            self._weight += block.weight
            while self.is_watch and self._weight - self._blocks[0].weight >= 1.5 * RENEWAL:
                oldest = self._blocks.popleft()
                self._total -= oldest.weight * oldest.difference
                self._weight -= oldest.weight
            self._better.update(block)
            self._worse.update(block)

    def _judge(self) -> None:
        self.trade = self.trade or self._lost_family()
        if self.verdict is None:
            self.verdict = self._found()

    @property
    def _family_needed(self) -> float:
        return len(self._families) * self._worse_needed

    def _lost_family(self) -> str | None:
        """Return how the new version loses on a family more than it gains on any other."""
        needed, parts = self._family_needed, self._families.values()
        for lost in parts:
            if lost.against.value < needed or len(parts) == 1:
                continue
            gain = max(one.difference for one in parts if one.weight >= KNOWN_FAMILY or one is lost)
            if -lost.difference > gain:
                means = f"{lost.mean(True) or 0:.2f} against {lost.mean(False) or 0:.2f}"
                return f"loses more on the tasks {lost.name!r}, {means}, than it gains on others"
        return None

    def _found(self) -> Verdict | None:
        for guard in self._guards:
            if guard.against.value >= self._guard_needed:
                shares = f"{guard.mean(True) or 0:.1%} against {guard.mean(False) or 0:.1%}"
                return Verdict("worse", f"more {guard.name} than the version before: {shares}")
        if self._worse.value >= self._worse_needed:
            return Verdict("worse", "scores lower than the version before")
        if self.trade is not None and self._rule.undecided == "keep":
            return Verdict("worse", self.trade)
        if self.is_watch:
            return None
        is_spoken_against = any(guard.against.value > 1 for guard in self._guards)
        if self._better.value >= self._better_needed and not is_spoken_against:
            margin = f"{self._rule.margin:g}"
            return Verdict("better", f"scores at most {margin} lower than the version before")
        return None


LEAST_SHARE: Final = 0.05
MOST_SHARE: Final = 0.5


def canary_share(episodes_per_hour: float, rule: "PublishOptions", taken: float = 0.0) -> float:
    """Return the share of new episodes with which a decision is expected in time.

    Args:
        episodes_per_hour: the policy's traffic.
        rule: its time to decide, and how late rewards come.
        taken: the control's share, which is nobody else's.
    """
    hours = max(rule.decide_within_h - rule.reward_delay_s / 3600, 0.0)
    both = episodes_per_hour * hours * (1 - taken)
    if both <= 4 * INFORMATION:
        share = MOST_SHARE
    else:
        share = max((1 - sqrt(1 - 4 * INFORMATION / both)) / 2, LEAST_SHARE)
    return share * (1 - taken)
