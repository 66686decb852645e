"""Test a claim about the difference of two versions by betting against it, block by block.

A player who bets a share b of their wealth on each block, at odds that are fair if the claim is
true, has the wealth

    W = Π (1 + b·(difference − null)/(reach + null)),  0 ≤ b < 1,

whose mean is at most 1 at all times if the mean of each difference, given all earlier ones, is at
most `null`. So with probability 1 − α it never reaches 1/α (Ville), however often it is checked.
The best stake depends on the true difference, so the evidence is the mean wealth of STAKES players,
each with half the stake of the one before. Waudby-Smith & Ramdas, "Estimating means of
bounded random variables by betting", JRSS-B 86 (2024), sections 3 and 4; averages over stakes:
Howard, Ramdas, McAuliffe & Sekhon, Annals of Statistics 49 (2021), section 3.5.
"""

from collections.abc import Collection, Iterable
from functools import lru_cache
from math import exp, fsum, log, log1p
from typing import Final, Literal, NamedTuple

# The bet: 1 that the difference is above the null, −1 that it is below.
Side = Literal[1, -1]
ABOVE: Final = 1
BELOW: Final = -1

# The largest share of wealth to bet, and the players' stakes for a block of weight 1.
MOST_BET: Final = 0.95
STAKES: Final = tuple(MOST_BET / 2**player for player in range(7))
# A player's wealth is capped at this, so that no float overflows.
MOST_WEALTH: Final = 1e200


class Block(NamedTuple):
    """The result of one block.

    Attributes:
        difference: mean of the tested arm − mean of the other arm, within ±`reach`.
        weight: n·m/(n + m) of the arms' episodes; the difference's variance is proportional to its
            inverse.
        reach: the largest possible absolute difference.
    """

    difference: float
    weight: float
    reach: float


class EProcess:
    """The wealth of seven players who bet against one claim, each starting with 1."""

    def __init__(self, null: float, side: Side) -> None:
        """Bet that the difference is on `side` of `null`, against the claim that it is not."""
        self._null = null
        self._side = side
        self._wealths = [1.0] * len(STAKES)

    @property
    def value(self) -> float:
        """Return the mean wealth: at 1/α the claim is refuted, wrongly with probability ≤ α."""
        return sum(self._wealths) / len(STAKES)

    def update(self, block: Block) -> None:
        """Settle the bets on one block."""
        gain = _bet_gain(block, self._null, self._side)
        self._wealths = [
            min(wealth * (1 + bet * gain), MOST_WEALTH)
            for wealth, bet in zip(self._wealths, _bets(block.weight), strict=True)
        ]


class ChangeDetector(EProcess):
    """The wealth of players who start with nothing and get a coin before each block.

    A claim that was true for long and becomes false is refuted soon after. While it is true,
    wealth − blocks has a mean of at most 0: on average, wealth reaches A at most once in A blocks.
    The recursion is Shiryaev's and Roberts'; see Shin, Ramdas & Rinaldo, "E-detectors", 2024.
    """

    def __init__(self, null: float, side: Side) -> None:
        super().__init__(null, side)
        self._wealths = [0.0] * len(STAKES)

    def update(self, block: Block) -> None:
        """Give each player a coin, and settle the bets on one block."""
        self._wealths = [wealth + 1 for wealth in self._wealths]
        super().update(block)


def log_wealth(blocks: Iterable[Block], null: float, side: Side) -> float:
    """Return the logarithm of the value of an `EProcess` after these blocks."""
    odds = [(_bet_gain(block, null, side), _bets(block.weight)) for block in blocks]
    logs = [
        fsum([log1p(bets[player] * won) for won, bets in odds]) for player in range(len(STAKES))
    ]
    most = max(logs)
    return most + log(fsum([exp(one - most) for one in logs]) / len(logs))


# Blocks of one size have few distinct weights, and each is bet on for many nulls.
@lru_cache(maxsize=4096)
def _bets(weight: float) -> tuple[float, ...]:
    """Return the players' stakes for a block of this weight."""
    return tuple([min(stake * weight, MOST_BET) for stake in STAKES])


def _bet_gain(block: Block, null: float, side: Side) -> float:
    """Return the gain of a bet of 1: −1 at worst, 0 on average if the difference is the null."""
    return side * (block.difference - null) / (block.reach + side * null)


MIN_BLOCK_SIZE: Final = 2
MAX_BLOCK_SIZE: Final = 64
# About the expected episodes of the rarer arm in a block of the smallest size.
RARER_EXPECTED: Final = 0.5
# A block is dropped if the other arm has not come after this many episodes.
LONGEST_BLOCK: Final = 1_000


class Blocks:
    """Cut a stream of values into blocks; each episode is in one block, in the order given."""

    def __init__(self, size: int) -> None:
        """Make blocks of at least `size` episodes, with at least one of each arm."""
        self.size = size
        self._open: list[tuple[bool, str, float]] = []
        self._arms = set[bool]()
        self._centres = FamilyMeans()

    def add(self, tested: bool, family: str, value: float) -> None:
        """Put a value of 0 to 1 into the open block."""
        self._open.append((tested, family, value))
        self._arms.add(tested)

    @property
    def is_full(self) -> bool:
        """Return whether the open block is large enough to close, or too long to keep open."""
        count = len(self._open)
        return (count >= self.size and len(self._arms) == 2) or count >= LONGEST_BLOCK

    def close(self) -> Block | None:
        """Close the open block, whatever its size; return None if an arm has no episode in it."""
        episodes, self._open = self._open, []
        self._arms.clear()
        block = self._compare_arms(episodes)
        for _, family, value in episodes:
            self._centres.add(family, value)
        return block

    def _compare_arms(self, episodes: list[tuple[bool, str, float]]) -> Block | None:
        count = sum([tested for tested, _, _ in episodes])
        others = len(episodes) - count
        if not count or not others:
            return None
        centres = {family: self._centres.mean_of(family) for family in {one[1] for one in episodes}}
        own = rest = 0.0
        for tested, family, value in episodes:
            if tested:
                own += value - centres[family]
            else:
                rest += value - centres[family]
        spread = max(centres.values()) - min(centres.values())
        return Block(own / count - rest / others, count * others / len(episodes), 1 + spread)


def block_size(tested: float, other: float) -> int:
    """Return the smallest size of a block, given the arms' shares of all episodes.

    Smaller blocks allow larger bets on large differences, so most blocks have one episode of the
    rarer arm. The end of a block depends on the episodes' arms, not on their scores.
    """
    share = tested / (tested + other) if tested + other > 0 else 0.0
    rarity = share * (1 - share)
    return (
        min(max(round(RARER_EXPECTED / rarity), MIN_BLOCK_SIZE), MAX_BLOCK_SIZE)
        if rarity > 0
        else MAX_BLOCK_SIZE
    )


# Weight, in episodes, of the mean of all families in the mean of one family.
PRIOR: Final = 5
# Further families are centred by the mean of all families, to bound memory.
MOST_CENTRES: Final = 10_000


class FamilyMeans:
    """The mean of each family, drawn towards the mean of all while the family has few episodes."""

    def __init__(self) -> None:
        # The middle of the range.
        self._all = (0.5, 1)
        self._families: dict[str, tuple[float, int]] = {}

    def add(self, family: str, value: float) -> None:
        """Count one more value of 0 to 1."""
        total, count = self._all
        self._all = (total + value, count + 1)
        if family in self._families or len(self._families) < MOST_CENTRES:
            total, count = self._families.get(family, (0.0, 0))
            self._families[family] = (total + value, count + 1)

    def mean_of(self, family: str) -> float:
        """Return the mean of a family's values so far, drawn towards that of all families."""
        all_total, all_count = self._all
        total, count = self._families.get(family, (0.0, 0))
        return (total + PRIOR * all_total / all_count) / (count + PRIOR)


# Bounds are multiples of 1/STEPS, rounded outwards.
STEPS: Final = 500


def difference_bound(blocks: Collection[Block], mistakes: float, side: Side) -> float:
    """Return the bound (−1 to 1) of the difference: the lower for ABOVE, the upper for BELOW.

    With probability 1 − `mistakes` the difference is never beyond the bound. Wealth is monotonic in
    the null, so bisection finds it.
    """
    needed = log(1 / mistakes)
    refuted, open_ = STEPS, -STEPS
    while refuted - open_ > 1:
        middle = (refuted + open_) // 2
        if log_wealth(blocks, -side * middle / STEPS, side) >= needed:
            refuted = middle
        else:
            open_ = middle
    return -side * refuted / STEPS
