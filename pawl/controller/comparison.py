"""Compare a new version with an old one by what came of their episodes, and come to a verdict.

This is the whole test: a canary against what serves, what serves against its control, and both
versions of an evaluation. It is a function of the episodes in their order, however often somebody
looks (docs/explanation/gate.md). It does no I/O and has no clock.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite, sqrt
from statistics import fmean, median
from typing import Final, Literal

import msgspec

from pawl.controller.eprocess import (
    ABOVE,
    BELOW,
    Block,
    Blocks,
    ChangeDetector,
    EProcess,
    block_size,
    lower_bound,
    upper_bound,
)

Mode = Literal["immediate", "evaluated", "canary"]
Kind = Literal["better", "worse"]

# What a sum of floats may come to past an end of its range, as a share of the width.
ROUNDING: Final = 1e-9
# The share of episodes by which a new version must go wrong more often to be worse for it.
GUARD_MARGIN: Final = 0.05
# Blocks of its own that a version needs to be called no worse, where several are one arm.
FEWEST_OWN: Final = 4
# A guard's evidence that keeps a version without proof from the traffic at the end of its time.
SUSPICIOUS: Final = 2.0
# An episode is slow if it takes this many times the median of the old version's.
SLOW: Final = 2.0
# The median is of the newest TIMES episodes of the old version, and is first taken of FIRST_TIMES.
TIMES: Final = 200
FIRST_TIMES: Final = 20


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Say how versions are judged: a recipe's `[publish]`, less the keys that are not read here.

    Attributes:
        mode: how a version gets the traffic.
        approve: whether a person has the last word.
        control_share: share of new episodes that the control of what serves keeps.
        decide_within_h: hours to decide a trial in; then the expected value decides.
        undecided: what becomes of a version whose evaluation ends without a verdict.
        margin: how much lower, in units of the reward, a version may score and still be no worse.
        reward_range: lowest and highest reward; others are clipped to it.
        reward_delay_s: seconds after its beginning at which an episode counts as it is then.
        mistakes: the greatest probability of calling one that is as good worse, and of calling one
            that is worse by the margin no worse, over all looks.

    Raises:
        ValueError: one of them is out of its range.
    """

    mode: Mode = "immediate"
    approve: bool = False
    control_share: float = 0.05
    decide_within_h: float = 12.0
    undecided: Literal["promote", "keep"] = "promote"
    margin: float = 0.05
    reward_range: tuple[float, float] = (0.0, 1.0)
    reward_delay_s: float = 600.0
    mistakes: float = 0.05

    def __post_init__(self) -> None:
        """Check what the arithmetic rests on."""
        low, high = self.reward_range
        if not (low < high and isfinite(high - low)):
            raise ValueError(
                f"reward_range is {low} to {high}; give the lowest reward, then a higher one"
            )
        if not 0 < self.margin < high - low:
            raise ValueError(
                f"margin is {self.margin}; give more than 0 and less than the range's width"
            )
        if not 0 < self.mistakes < 1:
            raise ValueError(f"mistakes is {self.mistakes}; give a probability, such as 0.05")
        if not 0 <= self.control_share <= 0.5:
            raise ValueError(f"control_share is {self.control_share}; give a share of 0 to 0.5")
        if not (self.reward_delay_s > 0 and self.decide_within_h > 0):
            raise ValueError("reward_delay_s and decide_within_h must be above 0")

    @property
    def width(self) -> float:
        """Return the width of the range of rewards."""
        return self.reward_range[1] - self.reward_range[0]

    def scaled(self, episode: "Episode") -> float | None:
        """Return an episode's reward, clipped, as a place in the range: 0 to 1; None if unscored.

        One that failed and has no reward counts as the lowest.

        Raises:
            ValueError: the reward is not a number.
        """
        if episode.reward is None:
            return 0.0 if episode.failed else None
        if episode.reward != episode.reward:
            raise ValueError("a reward is not a number (NaN); leave the episode unscored instead")
        low, high = self.reward_range
        return (min(max(episode.reward, low), high) - low) / self.width

    def clips(self, episode: "Episode") -> bool:
        """Return whether an episode's reward is outside of the range, and counts as its end."""
        if episode.reward is None:
            return False
        (low, high), past = self.reward_range, ROUNDING * self.width
        return not low - past <= episode.reward <= high + past


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

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._episodes = self._failed = self._clipped = self._scored = 0
        self._total = 0.0

    def add(self, episode: Episode, value: float | None) -> None:
        self._episodes += 1
        self._failed += episode.failed
        self._clipped += self._rule.clips(episode)
        if value is not None:
            self._scored += 1
            self._total += value

    def figures(self) -> ArmFigures:
        low, width = self._rule.reward_range[0], self._rule.width
        mean = low + width * self._total / self._scored if self._scored else None
        unscored = self._episodes - self._scored
        return ArmFigures(self._episodes, unscored, self._failed, self._clipped, mean)


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

    def __init__(
        self,
        name: str,
        read: Callable[[bool, Episode], bool | None],
        size: int,
        evidence: type[EProcess],
    ) -> None:
        self.name = name
        self.against = evidence(GUARD_MARGIN, ABOVE)
        self._read = read
        self._blocks = Blocks(size)
        self._counts = {True: (0, 0), False: (0, 0)}

    def read(self, is_new: bool, episode: Episode) -> bool | None:
        wrong = self._read(is_new, episode)
        if wrong is not None:
            bad, count = self._counts[is_new]
            self._counts[is_new] = (bad + wrong, count + 1)
        return wrong

    def add(self, is_new: bool, episode: Episode) -> None:
        wrong = self.read(is_new, episode)
        if wrong is not None:
            self.settle(self._blocks.add(is_new, episode.family, float(wrong)))

    def settle(self, block: Block | None) -> None:
        if block is not None:
            self.against.update(block)

    def share(self, is_new: bool) -> float | None:
        bad, count = self._counts[is_new]
        return bad / count if count else None


class Comparison:
    """Follow the episodes of a new version and of an old one, and come to a verdict.

    The probability of calling a new version worse that is as good is at most `mistakes`: half of it
    for the reward, the other half in equal parts for the guards. That of calling one no worse that
    is worse by the margin or more is at most `mistakes`. After a verdict later episodes are counted
    and decide nothing more. While a guard's evidence is against the new version, if only by chance,
    it is not called no worse.
    """

    def __init__(
        self, rule: Rule, *, new_share: float = 0.5, old_share: float = 0.5, watches: bool = False
    ) -> None:
        """Begin without episodes.

        The shares of live episodes size the blocks, and nothing that is decided rests on them. One
        that `watches` looks for a version that has become worse, however long it was not, and goes
        on to do so after the verdict "better".
        """
        self._rule = rule
        size = block_size(new_share, old_share)
        evidence = ChangeDetector if watches else EProcess
        self._watches = watches
        self._rewards = Blocks(size)
        self._has_rewards = False
        self._blocks: list[Block] = []
        self._better = EProcess(-rule.margin / rule.width, ABOVE)
        self._worse = evidence(0.0, BELOW)
        self._guards = [
            _Guard("failed requests", lambda _, episode: episode.failed, size, evidence),
            _Guard("malformed tool calls", lambda _, episode: episode.malformed, size, evidence),
            _Guard("slow episodes", _Slowness().read, size, evidence),
        ]
        self._arms = {True: _Arm(rule), False: _Arm(rule)}
        self._better_needed = 1 / rule.mistakes
        self._worse_needed = 2 / rule.mistakes
        self._guard_needed = len(self._guards) * self._worse_needed
        self._total = self._weight = 0.0
        self._marked = (0, 0.0)
        self._bounds = (0, -1.0, 1.0)
        self.verdict: Verdict | None = None

    def add(self, is_new: bool, episode: Episode) -> None:
        """Take in one live episode, after all those that began before it.

        A block of which every episode failed without a reward, whatever its version, says nothing:
        so it is in an outage.
        """
        value = self._rule.scaled(episode)
        self._arms[is_new].add(episode, value)
        for guard in self._guards:
            guard.add(is_new, episode)
        if value is not None:
            self._has_rewards |= episode.reward is not None
            block = self._rewards.add(is_new, episode.family, value)
            self._settle(block if self._has_rewards else None)
            self._has_rewards &= self._rewards.is_open
        self._judge()

    def add_pair(self, new: Sequence[Episode], old: Sequence[Episode]) -> None:
        """Take in what both versions made of one task: a block of its own.

        A task of which one version has no scored episode says nothing about the reward, nor does
        one in which all of both failed without one.
        """
        values: dict[bool, list[float]] = {True: [], False: []}
        for is_new, episodes in ((True, new), (False, old)):
            for episode in episodes:
                value = self._rule.scaled(episode)
                self._arms[is_new].add(episode, value)
                if value is not None:
                    values[is_new].append(value)
        if any(episode.reward is not None for episode in (*new, *old)):
            self._settle(_pair(values[True], values[False]))
        for guard in self._guards:
            wrong = [
                [float(bad) for bad in (guard.read(is_new, one) for one in of) if bad is not None]
                for is_new, of in ((True, new), (False, old))
            ]
            guard.settle(_pair(*wrong))
        self._judge()

    @property
    def blocks(self) -> int:
        """Return how many blocks of rewards, or tasks, were compared."""
        return len(self._blocks)

    @property
    def difference(self) -> float | None:
        """Return the estimate of new − old, in units of the reward; None before the first block."""
        return self._rule.width * self._total / self._weight if self._weight else None

    def mark(self) -> None:
        """Note that another version is the new one from now on, of several that are one arm."""
        self._marked = (len(self._blocks), self._total)

    @property
    def is_borne_out(self) -> bool:
        """Return whether the blocks since the mark, some at least, speak for the new version."""
        blocks, total = self._marked
        return len(self._blocks) - blocks >= FEWEST_OWN and self._total >= total

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
        count, width = len(self._blocks), self._rule.width
        if count > renewed * self._bounds[0]:
            lower = lower_bound(self._blocks, 1 / self._better_needed)
            upper = upper_bound(self._blocks, 1 / self._worse_needed)
            self._bounds = (count, lower, upper)
        return Figures(
            new=self._arms[True].figures(),
            old=self._arms[False].figures(),
            difference=self.difference,
            lower=self._bounds[1] * width,
            upper=self._bounds[2] * width,
            better=self._better.value,
            better_needed=self._better_needed,
            worse=self._worse.value,
            worse_needed=self._worse_needed,
            guards=[
                GuardFigures(
                    guard.name,
                    guard.share(True),
                    guard.share(False),
                    guard.against.value,
                    self._guard_needed,
                )
                for guard in self._guards
            ],
        )

    def _settle(self, block: Block | None) -> None:
        if block is not None:
            self._blocks.append(block)
            self._total += block.weight * block.difference
            self._weight += block.weight
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
        if self._better.value >= self._better_needed and self._against() is None:
            margin = f"{self._rule.margin:g}"
            return Verdict("better", f"scores at most {margin} lower than the version before")
        return None

    def _against(self) -> str | None:
        """Return the first guard whose evidence is against the new version, if only by chance."""
        return next((one.name for one in self._guards if one.against.value > 1), None)


def _pair(new: Sequence[float], old: Sequence[float]) -> Block | None:
    """Return what one task says, of values 0 to 1; None if one version has none."""
    if not new or not old:
        return None
    weight = len(new) * len(old) / (len(new) + len(old))
    return Block(fmean(new) - fmean(old), weight, 1.0)


# So many episodes' worth of information decide a trial whose version is better by 0.1 or so: n·m/(n
# + m) of the arms' episodes, rewards of 0 or 1.
INFORMATION: Final = 200.0
LEAST_SHARE: Final = 0.05
MOST_SHARE: Final = 0.5


def canary_share(episodes_per_hour: float, rule: Rule, taken: float = 0.0) -> float:
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
