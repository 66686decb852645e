"""Try a canary against what serves: promote it, retire it, or wait for more episodes."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import floor, log
from statistics import median
from typing import Final

import msgspec

from pawl.controller.gate.betting import (
    ABOVE,
    BELOW,
    MOST_WEALTH,
    ArmCount,
    Block,
    Blocks,
    Wealth,
    block_size,
    log_wealth,
    lower_bound,
    upper_bound,
)
from pawl.controller.gate.records import (
    BASE,
    CANARY,
    MOST_CLIPPED,
    SERVING,
    Decision,
    Episode,
    GateOptions,
    GuardFigures,
    Kind,
)
from store.records import Arm


class Reference(msgspec.Struct, frozen=True):
    """Hold the logarithm of the wealth against "at most this far above the base", by cell.

    Cell k is of differences from −1 + 2k/CELLS on; its entry is of its upper end, where the wealth
    is the least of the cell, rounded down. JSON as it is: part of a promotion's evidence.
    """

    logs: list[float]

    def __post_init__(self) -> None:
        """Check that there is an entry for each cell."""
        if len(self.logs) != CELLS:
            raise ValueError(f"a reference has {CELLS} entries, and this one {len(self.logs)}")


class Lead:
    """Compare a canary with the base model, in the order of their episodes.

    It does not end with the trial's verdict: episodes that began before the promotion, and count
    only after it, are as good.
    """

    def __init__(self, options: GateOptions, *, base_serves: bool = False) -> None:
        """Begin without episodes. If the base is what serves, it has no arm of its own."""
        self._options = options
        self._other = SERVING if base_serves else BASE
        served = 1 - options.canary_share - options.base_share
        other = served if base_serves else options.base_share
        self._rewards = Blocks(block_size(options.canary_share, other))
        self._blocks: list[Block] = []

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Take in more episodes, in order of their first calls; other arms are passed over."""
        for episode in episodes:
            if episode.arm not in (CANARY, self._other):
                continue
            value = self._options.scaled(episode)
            if value is None:
                continue
            block = self._rewards.add(episode.arm == CANARY, episode.family, value)
            if block is not None:
                self._blocks.append(block)

    def reference(self) -> Reference:
        """Return how far the canary was above the base, for the watch over it once it serves."""
        return reference_of(self._blocks)


# Differences of −1 to 1 are taken in cells of this width.
CELLS: Final = 100


def reference_of(blocks: Sequence[Block]) -> Reference:
    """Return the evidence of `blocks` on how far the canary is above the base model."""
    ends = [cell_start(cell + 1) for cell in range(CELLS)]
    return Reference([floor(100 * log_wealth(blocks, end, ABOVE)) / 100 for end in ends])


def lead_of_base() -> Reference:
    """Return what is known of how far the base model is above itself: neither more nor less."""
    surely = floor(log(MOST_WEALTH))
    return Reference([surely if cell_start(cell + 1) <= 0 else 0.0 for cell in range(CELLS)])


def joined(one: Reference, other: Reference) -> Reference:
    """Return what two sets of blocks say together that have no episode in common.

    The product of two fair games in turn, the second begun anew with 1, is a fair game.
    """
    return Reference([a + b for a, b in zip(one.logs, other.logs, strict=True)])


def cell_start(cell: int) -> float:
    """Return the lower end of a cell."""
    return -1 + 2 * cell / CELLS


# The share of episodes by which a canary must be worse before it can be retired for it.
MARGIN: Final = 0.05
# An episode is slow if it takes this many times the median of what serves.
SLOW: Final = 2.0
# The median is of the newest TIMES episodes of what serves, and is first taken of FIRST_TIMES.
TIMES: Final = 200
FIRST_TIMES: Final = 50


class Guard:
    """Bet that the canary's episodes go wrong in one way more often, by more than MARGIN.

    Attributes:
        name: what goes wrong, as a plural.
        wealth: against "not worse by more than MARGIN".
    """

    def __init__(self, name: str, block_size: int, read: Callable[[Episode], bool | None]) -> None:
        """Watch what `read` says of an episode; None where it does not apply."""
        self.name = name
        self.wealth = Wealth(MARGIN, ABOVE)
        self._read = read
        self._blocks = Blocks(block_size)
        self._counts: dict[Arm, tuple[int, int]] = {}

    def add(self, episode: Episode) -> bool:
        """Count one more episode of the two arms, and return whether bets were settled with it."""
        wrong = self._read(episode)
        if wrong is None:
            return False
        bad, count = self._counts.get(episode.arm, (0, 0))
        self._counts[episode.arm] = (bad + wrong, count + 1)
        block = self._blocks.add(episode.arm == CANARY, episode.family, float(wrong))
        if block is not None:
            self.wealth.update(block)
        return block is not None

    def figures(self, needed: float) -> GuardFigures:
        """Return how often it went wrong in each arm, and how much speaks against the canary."""
        canary, serving = self._share(CANARY), self._share(SERVING)
        return GuardFigures(self.name, canary, serving, self.wealth.value, needed)

    def _share(self, arm: Arm) -> float | None:
        bad, count = self._counts.get(arm, (0, 0))
        return bad / count if count else None


class Slowness:
    """Tell slow episodes from others by the median of what serves.

    The median that an episode is held against is of episodes before its block, so that no episode
    moves its own bar.
    """

    def __init__(self, block_size: int) -> None:
        """Take the median anew for each block."""
        self._times: deque[float] = deque(maxlen=TIMES)
        self._bar: float | None = None
        self._block_size = block_size
        self._judged = 0

    def is_slow(self, episode: Episode) -> bool | None:
        """Return whether an episode is slow; None if its time, or the median, is not known."""
        if episode.seconds is None:
            return None
        if self._judged % self._block_size == 0 and len(self._times) >= FIRST_TIMES:
            self._bar = SLOW * median(self._times)
        if episode.arm == SERVING:
            self._times.append(episode.seconds)
        if self._bar is None:
            return None
        self._judged += 1
        return episode.seconds > self._bar


def is_unscored(episode: Episode) -> bool:
    """Return whether an episode has neither a reward nor, as one that failed, counts as the lowest.

    Nor has one whose later calls are under way, or whose reward comes late: in both arms alike.
    """
    return episode.reward is None and not episode.failed


def all_guards(block_size: int) -> list[Guard]:
    """Return one guard for each way of going wrong."""
    return [
        Guard("failed requests", block_size, lambda episode: episode.failed),
        Guard("malformed tool calls", block_size, lambda episode: episode.malformed),
        Guard("failed tools", block_size, lambda episode: episode.tools_failed),
        Guard("slow episodes", block_size, Slowness(block_size).is_slow),
        Guard("unscored episodes", block_size, is_unscored),
    ]


# The bounds, which are for people, are taken anew once there are this many times the blocks.
RENEWED: Final = 1.05
REWARDS_OF: Final[dict[Arm, str]] = {
    CANARY: "the canary's rewards",
    SERVING: "the rewards of what serves",
}
NOT_ENOUGH = "the episodes so far do not suffice for a decision"


class Trial:
    """Follow one canary's episodes and those of what serves, in order, and come to a verdict.

    The work is that of the new episodes. What it finds is a function of the episodes alone, in
    their order, however they were handed over. Once there is a verdict, later ones are passed over.

    The probability of retiring one that is as good is at most `mistakes`: half of it for the
    reward, the other half in equal parts for the guards. That of promoting one that is worse by
    the margin or more is at most `mistakes`. Of a canary only one of the two can happen. None is
    promoted while a guard's bets have won so far, or while the range cuts many rewards: either
    only puts it off.
    """

    def __init__(self, options: GateOptions) -> None:
        """Begin without episodes."""
        self._options = options
        served = 1 - options.canary_share - options.base_share
        size = block_size(options.canary_share, served)
        self._rewards = Blocks(size)
        self._blocks: list[Block] = []
        self._better = Wealth(-options.scaled_margin, ABOVE)
        self._worse = Wealth(0.0, BELOW)
        self._guards = all_guards(size)
        self._better_needed, self._worse_needed = 1 / options.mistakes, 2 / options.mistakes
        self._guard_needed = len(self._guards) * self._worse_needed
        self._arms: dict[Arm, ArmCount] = {
            arm: ArmCount(options) for arm in (BASE, SERVING, CANARY)
        }
        self._verdict: tuple[Kind, str] | None = None
        self._bounds = (0, -1.0, 1.0)

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Take in more episodes, in order of their first calls, after all those before."""
        for episode in episodes:
            if self._verdict is None:
                self._take(episode)

    @property
    def is_decided(self) -> bool:
        """Return whether there is a verdict, which no later episode changes."""
        return self._verdict is not None

    def decide(self, age_s: float) -> Decision:
        """Return what is to be done with the canary at this age."""
        options = self._options
        kind, reason = self._verdict or self._without_verdict(age_s)
        lower, upper = self._interval(renew=kind != "wait")
        return Decision(
            kind=kind,
            reason=reason,
            lower=lower * options.width,
            upper=upper * options.width,
            better=self._better.value,
            better_needed=self._better_needed,
            worse=self._worse.value,
            worse_needed=self._worse_needed,
            arms={arm: count.figures() for arm, count in self._arms.items()},
            guards=[guard.figures(self._guard_needed) for guard in self._guards],
        )

    def _take(self, episode: Episode) -> None:
        value = self._options.scaled(episode)
        self._arms[episode.arm].add(episode, value)
        if episode.arm == BASE:
            return
        settled = [guard.add(episode) for guard in self._guards]
        if value is not None:
            settled.append(self._compare(episode, value))
        if any(settled):
            self._verdict = self._found()

    def _compare(self, episode: Episode, value: float) -> bool:
        """Take in one more reward, and return whether bets were settled with it."""
        block = self._rewards.add(episode.arm == CANARY, episode.family, value)
        if block is not None:
            self._blocks.append(block)
            self._better.update(block)
            self._worse.update(block)
        return block is not None

    def _found(self) -> tuple[Kind, str] | None:
        """Return the verdict, if there is one by now."""
        for guard in self._guards:
            if guard.wealth.value >= self._guard_needed:
                figures = guard.figures(self._guard_needed)
                shares = (
                    f"{figures.canary:.1%} of the canary's, {figures.serving:.1%} of the others"
                )
                return "retire", f"more {figures.name} than what serves: {shares}"
        if self._worse.value >= self._worse_needed:
            return "retire", "scores lower than what serves"
        if self._rewards_suffice and self._held_back() is None:
            return "promote", f"scores no lower than what serves, less {self._options.margin:g}"
        return None

    @property
    def _rewards_suffice(self) -> bool:
        fewest = min(self._arms[CANARY].scored, self._arms[SERVING].scored)
        return self._better.value >= self._better_needed and fewest >= self._options.fewest

    def _held_back(self) -> str | None:
        """Return why one whose rewards suffice is not promoted yet; None if nothing keeps it.

        A guard needs more for a verdict than the rewards do, and would come too late.
        """
        # A wealth above 1 may be by chance: it puts the promotion off.
        against = next((one.name for one in self._guards if one.wealth.value > 1), None)
        if against is not None:
            return f"it may have more {against} than what serves"
        return self._cut()

    def _cut(self) -> str | None:
        """Return of which arm the range cuts too many rewards to go by; None if of neither."""
        low, high = self._options.reward_range
        for arm, whose in REWARDS_OF.items():
            share = self._arms[arm].figures().clipped_share
            if share > MOST_CLIPPED:
                return (
                    f"{share:.0%} of {whose} lie outside of gate.reward_range, {low:g} to {high:g},"
                    " and count as its ends: set it to your rewards' lowest and highest, for the"
                    " versions to come"
                )
        return None

    def _without_verdict(self, age_s: float) -> tuple[Kind, str]:
        why, held_back, cut = NOT_ENOUGH, self._held_back(), self._cut()
        if self._rewards_suffice and held_back is not None:
            why = f"its rewards suffice, but {held_back}"
        elif cut is not None:
            why = f"{NOT_ENOUGH}, and {cut}"
        if age_s < self._options.deadline_s:
            return "wait", why
        return "retire", f"not shown to be good enough before its deadline ({age_s:.0f} s): {why}"

    def _interval(self, renew: bool) -> tuple[float, float]:
        """Return the bounds, of blocks that are at most a twentieth fewer than all."""
        count = len(self._blocks)
        if count > self._bounds[0] and (renew or count >= RENEWED * self._bounds[0]):
            lower = lower_bound(self._blocks, 1 / self._better_needed)
            upper = upper_bound(self._blocks, 1 / self._worse_needed)
            self._bounds = (count, lower, upper)
        return self._bounds[1:]
