"""Compare a new version with an old one by the results of their episodes, and reach a verdict.

This is the whole test: of a canary against the serving version, of the serving version against its
control, and of both versions of an evaluation. The verdict depends only on the episodes and their
order, not on how often it is checked (docs/explanation/gate.md). No I/O, no clock.
"""

from collections import deque
from collections.abc import Sequence
from math import isnan, sqrt
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.eprocess import (
    ABOVE,
    BELOW,
    Block,
    Blocks,
    ChangeDetector,
    EProcess,
    Side,
    block_size,
    difference_bound,
)
from controller.own_past import OwnPast, Scored

if TYPE_CHECKING:
    from trainer.recipes.recipe import PublishOptions

Kind = Literal["better", "worse"]

# Tolerance for a sum of floats beyond its range, as a share of the width.
ROUNDING: Final = 1e-9
# A guard calls a new version worse if its share of bad episodes is higher by more than this.
GUARD_MARGIN: Final = 0.05
# With this evidence of a guard, a version without a verdict is not promoted when its time is over.
SUSPICIOUS_EVIDENCE: Final = 2.0
# Information that decides a trial if the new version is better by about 0.1: n·m/(n + m) over the
# arms' episodes, with rewards of 0 or 1.
TRIAL_INFORMATION: Final = 200.0
# Information after which the control may move on. A watch estimates the difference from the newest
# blocks, which together have 1.5 times this information.
RENEWAL_INFORMATION: Final = 64.0
# A watch calls an equally good version worse at most once in this many episodes: a week at one a
# second.
FALSE_ONCE_IN: Final = 600_000
# Only the first families of tasks are compared separately, at most this many.
MOST_FAMILIES: Final = 64
# The least information with which a family's gain counts.
LEAST_FAMILY_INFORMATION: Final = 10.0
# An episode is slow if it takes this many times the median of the old version's.
SLOW_FACTOR: Final = 2.0
# The median is over the newest MEDIAN_EPISODES episodes of the old version, and needs at least
# FEWEST_MEDIAN_EPISODES.
MEDIAN_EPISODES: Final = 200
FEWEST_MEDIAN_EPISODES: Final = 20


class ComparedEpisode(msgspec.Struct, frozen=True):
    """What a comparison uses of one episode.

    Attributes:
        family: its task's family; tasks of one family are scored alike.
        reward: None if the episode is unscored.
        failed: whether one of its requests failed.
        malformed: whether one of its tool calls was malformed; None if it called no tool.
        seconds: how long its calls took, in a unit that both versions share; None if unknown.
        version: the version that answered it; in a watch one arm has several versions.
        task: its task; None if it is unknown.
    """

    family: str
    reward: float | None
    failed: bool = False
    malformed: bool | None = None
    seconds: float | None = None
    version: int = 0
    task: str | None = None


class ArmFigures(msgspec.Struct, frozen=True):
    """Episode counts of one arm; `clipped` counts rewards outside the recipe's range.

    `mean` is the mean reward of the scored episodes.
    """

    episodes: int
    unscored: int
    failed: int
    clipped: int
    mean: float | None


class PartFigures(msgspec.Struct, frozen=True):
    """Both versions' means (0 to 1) for a guard or a family of tasks, called `name`.

    The means of a guard are shares of bad episodes. `against` is the evidence that the new version
    is worse here; it counts once it reaches `needed`.
    """

    name: str
    new: float | None
    old: float | None
    against: float
    needed: float


class Figures(msgspec.Struct, frozen=True):
    """The figures behind a verdict, stored as JSON.

    Attributes:
        difference: estimate of new − old, in units of the reward; None before the first block.
        lower: lower bound of the difference, true at all times with probability 1 − `mistakes`.
        upper: upper bound, true at all times with probability 1 − `mistakes`/2.
        better: evidence against "worse by the margin or more"; `better_needed` shows that the new
            version is no worse.
        worse: evidence against "as good"; `worse_needed` shows that the new version is worse.
        guards: failed requests, malformed tool calls, slow episodes.
        families: families of tasks, if there are several.
        fall: see `Comparison.fall`.
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
    """The conclusion about the new version: `worse`, or `better` (not worse by the margin).

    `reason` is a sentence for people.
    """

    kind: Kind
    reason: str


class _Arm:
    """The episodes of one version, counted, and the sum of their rewards."""

    def __init__(self) -> None:
        self.episodes = self.failed = self.clipped = self.scored = 0
        self.total = 0.0


class _Slowness:
    """Decide whether an episode is slow, by the median time of the old version's earlier ones."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MEDIAN_EPISODES)
        self._bar: float | None = None
        self._seen = 0

    def is_slow(self, is_new: bool, episode: ComparedEpisode) -> bool | None:
        """Return whether an episode is slow; None if its time or the median is unknown."""
        if episode.seconds is None:
            return None
        # Computed every FEWEST_MEDIAN_EPISODES from earlier ones: no episode moves its own bar.
        if self._seen % FEWEST_MEDIAN_EPISODES == 0 and len(self._times) >= FEWEST_MEDIAN_EPISODES:
            self._bar = SLOW_FACTOR * median(self._times)
        self._seen += 1
        if not is_new:
            self._times.append(episode.seconds)
        return None if self._bar is None else episode.seconds > self._bar


class _Part:
    """A guard or a family of tasks, with a bet that new − old is on `side` of `null`."""

    def __init__(
        self, name: str, size: int, evidence: type[EProcess], null: float, side: Side
    ) -> None:
        self.name = name
        self.blocks = Blocks(size)
        self.against = evidence(null, side)
        self.weight = self._weighted_sum = 0.0
        self._sums = {True: (0.0, 0), False: (0.0, 0)}

    def add(self, is_new: bool, family: str, value: float) -> None:
        total, count = self._sums[is_new]
        self._sums[is_new] = (total + value, count + 1)
        self.blocks.add(is_new, family, value)

    def settle_bets(self) -> None:
        block = self.blocks.close()
        if block is not None:
            self.against.update(block)
            self.weight += block.weight
            self._weighted_sum += block.weight * block.difference

    @property
    def difference(self) -> float:
        return self._weighted_sum / self.weight if self.weight else 0.0

    def mean(self, is_new: bool) -> float | None:
        total, count = self._sums[is_new]
        return total / count if count else None

    def figures(self, needed: float) -> PartFigures:
        means = self.mean(True), self.mean(False)
        return PartFigures(self.name, *means, self.against.value, needed)


class Comparison:
    """Take in the episodes of a new and an old version, and reach a verdict.

    The probability of calling an equally good version worse is at most `mistakes`: half of it for
    the reward, the other half in equal parts for the guards. The probability of calling a version
    no worse that is worse by the margin or more is at most `mistakes`. Episodes after the verdict
    are counted and change nothing. A version is not called no worse while a guard's evidence is
    above 1.

    A watch compares successive serving versions, as one arm, with their control, and finds when
    that arm has become worse. It calls an equally good arm worse at most once in FALSE_ONCE_IN
    episodes.

    Attributes:
        verdict: None while neither worse nor no worse is shown.
        trade: a sentence about a family of tasks on which the new version loses more than it gains
            on any other; None if there is no such family. With `undecided = "keep"` the verdict is
            then worse.
    """

    def __init__(
        self,
        rule: "PublishOptions",
        *,
        new_share: float = 0.5,
        old_share: float = 0.5,
        watches: bool = False,
    ) -> None:
        """Start empty; the arms' shares of live episodes only set the size of blocks."""
        self._rule = rule
        self._low, high = rule.reward_range
        self._width = high - self._low
        self._size = block_size(new_share, old_share)
        self._evidence = ChangeDetector if watches else EProcess
        self._rewards = Blocks(self._size)
        self._has_rewards = False
        # A watch keeps only the blocks that decide now.
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
        # `_total` and `_weight` sum over `_blocks`, `…_ever` over all blocks so far.
        self._total = self._weight = self._total_ever = self._weight_ever = 0.0
        self._bounds = (0, -1.0, 1.0)
        self.is_watch = watches
        self._own_past = OwnPast()
        # `_weight_ever` at the first episode of each new version.
        self._weight_before: dict[int, float] = {}
        self.verdict: Verdict | None = None
        self.trade: str | None = None

    def add_past(self, episode: ComparedEpisode) -> None:
        """Add an episode from before the watch, only as a baseline to detect a fall of rewards."""
        value = self._reward_share(episode)
        if value is not None and not episode.failed:
            self._own_past.add(Scored(episode.family, episode.task, value), is_past=True)

    def add(self, is_new: bool, episode: ComparedEpisode) -> None:
        """Add a live episode; episodes must come in the order in which they count."""
        if is_new:
            self._weight_before.setdefault(episode.version, self._weight_ever)
        self._count_episode(is_new, episode)
        parts = *self._guards, *filter(None, [self._families.get(episode.family)])
        full = [part for part in parts if part.blocks.is_full]
        for part in full:
            part.settle_bets()
        if self._rewards.is_full:
            self._settle_rewards()
            self._judge()
        elif full:
            self._judge()

    def add_pair(self, new: Sequence[ComparedEpisode], old: Sequence[ComparedEpisode]) -> None:
        """Add both versions' episodes of one task, as a block of their own.

        If one version has no scored episode, the task does not count for the reward.
        """
        for is_new, episodes in ((True, new), (False, old)):
            for episode in episodes:
                self._count_episode(is_new, episode)
        for part in (*self._guards, *self._families.values()):
            part.settle_bets()
        self._settle_rewards()
        self._judge()

    @property
    def difference(self) -> float | None:
        """Return the estimate of new − old, in units of the reward; None before the first block."""
        return self._width * self._total / self._weight if self._weight else None

    @property
    def fall(self) -> float | None:
        """Return how far the new arm's rewards fell below their own past, as a share of the range.

        None if they did not. After a fall, `difference` and its bounds use later blocks only.
        """
        return self._own_past.fall

    @property
    def scores_lower(self) -> bool:
        """Return whether the new version scores lower, by the TRIAL_INFORMATION of all blocks.

        It says so of any lower average, however small; a verdict needs evidence.
        """
        return self.has_trial_information and self._total_ever < 0

    @property
    def has_trial_information(self) -> bool:
        """Return whether all blocks together have the TRIAL_INFORMATION that decides a trial."""
        return self._weight_ever >= TRIAL_INFORMATION

    @property
    def may_move_control(self) -> bool:
        """Return whether there is enough information, and no sign of harm, to move the control."""
        return self._weight >= RENEWAL_INFORMATION and not self.points_to_harm

    @property
    def next_control(self) -> int | None:
        """Return the version to become the control, or None if the control may not move.

        It is the newest version since whose first episode half of RENEWAL_INFORMATION was
        collected, which suffices to notice that rewards have fallen since then.
        """
        measured = [
            version
            for version, before in self._weight_before.items()
            if self._weight_ever - before >= RENEWAL_INFORMATION / 2
        ]
        return max(measured) if measured and self.may_move_control else None

    @property
    def points_to_harm(self) -> bool:
        """Return whether the evidence so far, however little, points against the new version.

        It does if a guard has some evidence, or if the estimated difference is below 0. For a
        canary and a watch, whose version is compared further, it must be below −margin/2.
        """
        is_compared_later = self._rule.mode == "canary" or self.is_watch
        least = -self._rule.margin / 2 if is_compared_later else 0.0
        bar = sqrt(self._guard_needed) if self.is_watch else SUSPICIOUS_EVIDENCE
        is_guarded = any(guard.against.value >= bar for guard in self._guards)
        return is_guarded or (self.difference or 0.0) < least

    def figures(self, renewed: float = 1.0) -> Figures:
        """Return the figures behind the verdict.

        The bounds are computed again once there are more than `renewed` times the blocks that
        they were last computed from.
        """
        count = self.blocks
        if count > renewed * self._bounds[0]:
            lower = difference_bound(self._blocks, self._rule.mistakes, ABOVE)
            upper = difference_bound(self._blocks, self._rule.mistakes / 2, BELOW)
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

    def _count_episode(self, is_new: bool, episode: ComparedEpisode) -> None:
        """Count an episode, and put it into the open blocks."""
        wrong = (episode.failed, episode.malformed, self._slowness.is_slow(is_new, episode))
        for guard, is_wrong in zip(self._guards, wrong, strict=True):
            if is_wrong is not None:
                guard.add(is_new, episode.family, float(is_wrong))
        arm = self._arms[is_new]
        arm.episodes += 1
        arm.failed += episode.failed
        value = self._reward_share(episode)
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
        if family is None and len(self._families) < MOST_FAMILIES:
            family = _Part(episode.family, self._size, self._evidence, 0.0, BELOW)
            self._families[episode.family] = family
        if family is not None:
            family.add(is_new, episode.family, value)
        # In an outage every version fails: failed episodes are no sign of a fall.
        if is_new and self.is_watch and not episode.failed and self.fall is None:
            self._own_past.add(Scored(episode.family, episode.task, value))
            if self.fall is not None:
                self._blocks.clear()
                self._total = self._weight = 0.0
                self._rewards.size = block_size(MOST_SHARE, MOST_SHARE)

    def _reward_share(self, episode: ComparedEpisode) -> float | None:
        """Return the reward as a share of its range, clipped.

        Without a reward, or with NaN, it is 0 for a failed episode and None (unscored) otherwise.
        """
        if episode.reward is None or isnan(episode.reward):
            return 0.0 if episode.failed else None
        return min(max((episode.reward - self._low) / self._width, 0.0), 1.0)

    def _settle_rewards(self) -> None:
        """Settle the bets on the open block of rewards.

        A block is dropped if all its episodes failed without a reward: that is an outage.
        """
        block = self._rewards.close()
        self._close_block(block if self._has_rewards else None)
        self._has_rewards = False

    def _close_block(self, block: Block | None) -> None:
        if block is not None:
            self._blocks.append(block)
            self.blocks += 1
            self._total_ever += block.weight * block.difference
            self._weight_ever += block.weight
            self._total += block.weight * block.difference
            self._weight += block.weight
            while (
                self.is_watch and self._weight - self._blocks[0].weight >= 1.5 * RENEWAL_INFORMATION
            ):
                oldest = self._blocks.popleft()
                self._total -= oldest.weight * oldest.difference
                self._weight -= oldest.weight
            self._better.update(block)
            self._worse.update(block)

    def _judge(self) -> None:
        self.trade = self.trade or self._lost_family()
        if self.verdict is None:
            self.verdict = self._find_verdict()

    @property
    def _family_needed(self) -> float:
        return len(self._families) * self._worse_needed

    def _lost_family(self) -> str | None:
        """Return a sentence on a family that loses more than any other gains, or None."""
        needed, parts = self._family_needed, self._families.values()
        for lost in parts:
            if lost.against.value < needed or len(parts) == 1:
                continue
            gain = max(
                one.difference
                for one in parts
                if one.weight >= LEAST_FAMILY_INFORMATION or one is lost
            )
            if -lost.difference > gain:
                means = f"{lost.mean(True) or 0:.2f} against {lost.mean(False) or 0:.2f}"
                return f"loses more on the tasks {lost.name!r}, {means}, than it gains on others"
        return None

    def _find_verdict(self) -> Verdict | None:
        for guard in self._guards:
            if guard.against.value >= self._guard_needed:
                shares = f"{guard.mean(True) or 0:.1%} against {guard.mean(False) or 0:.1%}"
                return Verdict("worse", f"more {guard.name} than the old version: {shares}")
        if self._worse.value >= self._worse_needed:
            return Verdict("worse", "scores lower than the old version")
        if self.trade is not None and self._rule.undecided == "keep":
            return Verdict("worse", self.trade)
        if self.is_watch:
            return None
        is_suspected = any(guard.against.value > 1 for guard in self._guards)
        if self._better.value >= self._better_needed and not is_suspected:
            margin = f"{self._rule.margin:g}"
            return Verdict("better", f"scores at most {margin} lower than the old version")
        return None


LEAST_SHARE: Final = 0.05
MOST_SHARE: Final = 0.5


def canary_share(episodes_per_hour: float, rule: "PublishOptions", taken: float = 0.0) -> float:
    """Return the share of new episodes that a canary needs to be decided about in time.

    Args:
        episodes_per_hour: the policy's traffic.
        rule: its time to decide, and how late rewards come.
        taken: the control's share, which neither arm can have.
    """
    hours = max(rule.decide_within_h - rule.reward_delay_s / 3600, 0.0)
    both = episodes_per_hour * hours * (1 - taken)
    if both <= 4 * TRIAL_INFORMATION:
        share = MOST_SHARE
    else:
        share = max((1 - sqrt(1 - 4 * TRIAL_INFORMATION / both)) / 2, LEAST_SHARE)
    return share * (1 - taken)
