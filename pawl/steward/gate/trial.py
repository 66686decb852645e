"""Try a canary against what serves: promote it, retire it, or wait for more episodes."""

from collections.abc import Iterable
from typing import Final

from pawl.steward.gate.blocks import Block, Blocks, block_size
from pawl.steward.gate.counts import ArmCount
from pawl.steward.gate.guards import all_guards
from pawl.steward.gate.interval import lower_bound, upper_bound
from pawl.steward.gate.records import (
    BASE,
    CANARY,
    MOST_CLIPPED,
    SERVING,
    Arm,
    Decision,
    Episode,
    GateOptions,
    Kind,
)
from pawl.steward.gate.wealth import ABOVE, BELOW, Wealth

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

    @property
    def _better_needed(self) -> float:
        return 1 / self._options.mistakes

    @property
    def _worse_needed(self) -> float:
        return 2 / self._options.mistakes

    @property
    def _guard_needed(self) -> float:
        return 2 * len(self._guards) / self._options.mistakes

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
            if guard.wealth >= self._guard_needed:
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
        against = next((guard.name for guard in self._guards if guard.speaks_against), None)
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


def decide(episodes: Iterable[Episode], options: GateOptions, age_s: float) -> Decision:
    """Return what is to be done with a canary of this age, of all its episodes at once."""
    trial = Trial(options)
    trial.extend(episodes)
    return trial.decide(age_s)
