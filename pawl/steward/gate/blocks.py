"""Compare two arms within blocks of consecutive episodes.

Within a block, given how many episodes each arm got, every assignment of arms to its episodes is
as likely as any other: arms are drawn by a hash. So the difference of the arms' means has the
effect of the one on the other as its mean, however tasks, families and the world change from
episode to episode, and whatever share the arms had (Neyman's completely randomised experiment, in
blocks). Each value is taken relative to its family's mean, as known before the block, which is the
same for both arms: that changes no mean, and takes the spread between families out.
"""

from typing import Final, NamedTuple

from pawl.steward.gate.centres import Centres

FEWEST: Final = 8
MOST: Final = 64
# Episodes of the rarer arm that a block holds on average.
RARER: Final = 1.5


class Block(NamedTuple):
    """Hold what one block says.

    Attributes:
        difference: of the means, tested arm − other arm, within ±`reach`.
        weight: n·m/(n + m) of the arms' episodes: variances of differences are as its inverses.
        reach: the greatest difference, either way, that the block could have shown.
    """

    difference: float
    weight: float
    reach: float


class Blocks:
    """Make blocks of a stream of values; each episode is in one, in the order given."""

    def __init__(self, size: int) -> None:
        """Make blocks of `size` episodes."""
        self._size = size
        self._open: list[tuple[bool, str, float]] = []
        self._centres = Centres()

    def add(self, tested: bool, family: str, value: float) -> Block | None:
        """Return the block that this value (0 to 1) completes, if it completes one.

        None too where a completed block holds episodes of one arm alone: it says nothing.
        """
        self._open.append((tested, family, value))
        if len(self._open) < self._size:
            return None
        return self.close()

    def close(self) -> Block | None:
        """Complete the block that is open, however many it holds, and return what it says."""
        episodes, self._open = self._open, []
        block = self._compare(episodes)
        for _, one, reward in episodes:
            self._centres.add(one, reward)
        return block

    def _compare(self, episodes: list[tuple[bool, str, float]]) -> Block | None:
        count = sum([tested for tested, _, _ in episodes])
        others = len(episodes) - count
        if not count or not others:
            return None
        centres = {family: self._centres.of(family) for family in {one[1] for one in episodes}}
        own = rest = 0.0
        for tested, family, value in episodes:
            if tested:
                own += value - centres[family]
            else:
                rest += value - centres[family]
        spread = max(centres.values()) - min(centres.values())
        return Block(own / count - rest / others, count * others / len(episodes), 1 + spread)


def block_size(tested: float, other: float) -> int:
    """Return how many episodes a block has, for the arms' shares of all episodes.

    Larger blocks lose less to those with one arm alone (1/size of the information), smaller ones
    let more be bet on large differences: one or two episodes of the rarer arm are a compromise.
    """
    share = tested / (tested + other) if tested + other > 0 else 0.0
    rarity = share * (1 - share)
    return min(max(round(RARER / rarity), FEWEST), MOST) if rarity > 0 else MOST
