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
    block_size,
    bound,
)

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
# An episode is slow if it takes this many times the median of the old version's.
SLOW: Final = 2.0
# The median is of the newest TIMES episodes of the old version, and is first taken of FIRST_TIMES.
TIMES: Final = 200
FIRST_TIMES: Final = 20


class Episode(msgspec.Struct, frozen=True):
    """Hold what a comparison needs of one episode.

    Attributes:
        family: what its task is one of; tasks of one family are scored alike.
        reward: its reward, or None if nobody scored it.
        failed: whether a request of it failed.
        malformed: whether a tool call of it was malformed; None if it called no tool.
        seconds: how long its calls took, in a unit that both versions share; None if unknown.
    """

    family: str
    reward: float | None
    failed: bool = False
    malformed: bool | None = None
    seconds: float | None = None


class ArmFigures(msgspec.Struct, frozen=True):
    """Count what was seen of one version; `mean` is of scored episodes, in units of the reward."""

    episodes: int
    unscored: int
    failed: int
    clipped: int
    mean: float | None


class GuardFigures(msgspec.Struct, frozen=True):
    """Say how often something went wrong for both versions, and how much speaks against the new."""

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
    guards: list[GuardFigures]


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

    def read(self, is_new: bool, episode: Episode) -> bool | None:
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


class _Guard:
    """Bet that the new version's episodes go wrong in one way more often, by GUARD_MARGIN."""

    def __init__(self, name: str, size: int, evidence: type[EProcess]) -> None:
        self.name = name
        self.blocks = Blocks(size)
        self.against = evidence(GUARD_MARGIN, ABOVE)
        self._counts = {True: (0, 0), False: (0, 0)}

    def add(self, is_new: bool, family: str, wrong: bool | None) -> None:
        if wrong is not None:
            bad, count = self._counts[is_new]
            self._counts[is_new] = (bad + wrong, count + 1)
            self.blocks.add(is_new, family, float(wrong))

    def settle(self) -> None:
        block = self.blocks.close()
        if block is not None:
            self.against.update(block)

    def share(self, is_new: bool) -> float | None:
        bad, count = self._counts[is_new]
        return bad / count if count else None

    def figures(self, needed: float) -> GuardFigures:
        shares = self.share(True), self.share(False)
        return GuardFigures(self.name, *shares, self.against.value, needed)


class Comparison:
    """Follow the episodes of a new version and of an old one, and come to a verdict.

    The probability of calling a new version worse that is as good is at most `mistakes`: half of it
    for the reward, the other half in equal parts for the guards. That of calling one no worse that
    is worse by the margin or more is at most `mistakes`. After a verdict later episodes are counted
    and decide nothing more. While a guard's evidence is against the new version, if only by chance,
    it is not called no worse.
    """

    def __init__(
        self,
        rule: "PublishOptions",
        *,
        new_share: float = 0.5,
        old_share: float = 0.5,
        watches: bool = False,
    ) -> None:
        """Begin without episodes.

        The shares of live episodes size the blocks, and nothing that is decided rests on them. One
        that `watches` looks for a version that has become worse, however long it was not, and goes
        on to do so after the verdict "better".
        """
        self._rule = rule
        self._low, high = rule.reward_range
        self._width = high - self._low
        size = block_size(new_share, old_share)
        evidence = ChangeDetector if watches else EProcess
        self._watches = watches
        self._rewards = Blocks(size)
        self._has_rewards = False
        self._blocks: list[Block] = []
        self._better = EProcess(-rule.margin / self._width, ABOVE)
        self._worse = evidence(0.0, BELOW)
        self._slowness = _Slowness()
        self._guards = [
            _Guard(name, size, evidence)
            for name in ("failed requests", "malformed tool calls", "slow episodes")
        ]
        self._arms = {True: _Arm(), False: _Arm()}
        self._better_needed = 1 / rule.mistakes
        self._worse_needed = 2 / rule.mistakes
        self._guard_needed = len(self._guards) * self._worse_needed
        self._total = self._weight = 0.0
        # Of the newest version alone, where several are one arm.
        self._own_total = self._own_weight = 0.0
        self._bounds = (0, -1.0, 1.0)
        self.verdict: Verdict | None = None

    def add(self, is_new: bool, episode: Episode) -> None:
        """Take in one live episode, after all those that began before it."""
        self._take(is_new, episode)
        for guard in self._guards:
            if guard.blocks.is_full:
                guard.settle()
        if self._rewards.is_full:
            self._close()
        self._judge()

    def add_pair(self, new: Sequence[Episode], old: Sequence[Episode]) -> None:
        """Take in what both versions made of one task: a block of its own.

        A task of which one version has no scored episode says nothing about the reward.
        """
        for is_new, episodes in ((True, new), (False, old)):
            for episode in episodes:
                self._take(is_new, episode)
        for guard in self._guards:
            guard.settle()
        self._close()
        self._judge()

    @property
    def blocks(self) -> int:
        """Return how many blocks of rewards, or tasks, were compared."""
        return len(self._blocks)

    @property
    def difference(self) -> float | None:
        """Return the estimate of new − old, in units of the reward; None before the first block."""
        return self._width * self._total / self._weight if self._weight else None

    def mark(self) -> None:
        """Begin anew what speaks for the new version: from now on it is another one.

        Several that follow each other are one arm; what speaks against one speaks against all.
        """
        self._close()
        self._better = EProcess(-self._rule.margin / self._width, ABOVE)
        self._own_total = self._own_weight = 0.0
        if self.verdict is not None and self.verdict.kind == "better":
            self.verdict = None

    @property
    def tells_against(self) -> bool:
        """Return whether as much is known as decides a trial, and the newest version is lower."""
        return self._own_weight >= INFORMATION and self._own_total < 0

    @property
    def points_to_harm(self) -> bool:
        """Return whether what was seen so far, however little, speaks against the new version.

        An expected difference below 0 does; of a canary only below half the margin, as it is
        compared on with as many episodes once it serves. So does a guard with some evidence.
        """
        least = -self._rule.margin / 2 if self._rule.mode == "canary" else 0.0
        is_guarded = any(guard.against.value >= SUSPICIOUS for guard in self._guards)
        return is_guarded or (self.difference or 0.0) < least

    def figures(self, renewed: float = 1.0) -> Figures:
        """Return all that the verdict rests on.

        The bounds are taken anew once there are `renewed` times the blocks of the last time.
        """
        count = len(self._blocks)
        if count > renewed * self._bounds[0]:
            lower = bound(self._blocks, 1 / self._better_needed, ABOVE)
            upper = bound(self._blocks, 1 / self._worse_needed, BELOW)
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
        )

    def _figures_of(self, is_new: bool) -> ArmFigures:
        arm = self._arms[is_new]
        mean = self._low + self._width * arm.total / arm.scored if arm.scored else None
        return ArmFigures(arm.episodes, arm.episodes - arm.scored, arm.failed, arm.clipped, mean)

    def _take(self, is_new: bool, episode: Episode) -> None:
        """Count an episode, and put it into the open blocks.

        One that failed and has no reward counts as the lowest; any other without one is unscored,
        as is one whose reward is not a number.
        """
        wrong = (episode.failed, episode.malformed, self._slowness.read(is_new, episode))
        for guard, is_wrong in zip(self._guards, wrong, strict=True):
            guard.add(is_new, episode.family, is_wrong)
        arm = self._arms[is_new]
        arm.episodes += 1
        arm.failed += episode.failed
        place = 0.0
        if episode.reward is not None and not isnan(episode.reward):
            place = (episode.reward - self._low) / self._width
            arm.clipped += not -ROUNDING <= place <= 1 + ROUNDING
            self._has_rewards = True
        elif not episode.failed:
            return
        value = min(max(place, 0.0), 1.0)
        arm.scored += 1
        arm.total += value
        self._rewards.add(is_new, episode.family, value)

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
            told = block.weight * block.difference
            self._total, self._own_total = self._total + told, self._own_total + told
            self._weight, self._own_weight = (
                self._weight + block.weight,
                self._own_weight + block.weight,
            )
            self._better.update(block)
            self._worse.update(block)

    def _judge(self) -> None:
        if self.verdict is None or (self._watches and self.verdict.kind == "better"):
            self.verdict = self._found() or self.verdict

    def _found(self) -> Verdict | None:
        for guard in self._guards:
            if guard.against.value >= self._guard_needed:
                shares = f"{guard.share(True) or 0:.1%} against {guard.share(False) or 0:.1%}"
                return Verdict("worse", f"more {guard.name} than the version before: {shares}")
        if self._worse.value >= self._worse_needed:
            return Verdict("worse", "scores lower than the version before")
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
