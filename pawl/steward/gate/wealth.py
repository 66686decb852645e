"""Test a claim about a difference by betting against it, block by block.

Whoever bets a share b of what they have on each block, at fair odds if the claim is true, has

    W = Π (1 + b·(difference − null)/(reach + null)),  0 ≤ b < 1,

and W has a mean of at most 1 at all times if the mean of each difference, given all before it, is
at most `null`. So with probability 1 − α it never reaches 1/α (Ville), whenever and however often
somebody looks. How much is best to bet depends on the true difference: W is the mean over BETS
players, each with half the stake of the one before. Waudby-Smith & Ramdas, "Estimating means of
bounded random variables by betting", JRSS-B 86 (2024), sections 3 and 4; averages over stakes:
Howard, Ramdas, McAuliffe & Sekhon, Annals of Statistics 49 (2021), section 3.5.
"""

from collections.abc import Iterable
from functools import lru_cache
from math import exp, fsum, log, log1p
from typing import Final, Literal

from pawl.steward.gate.blocks import Block

# 1: that the difference is above the null; −1: that it is below.
Side = Literal[1, -1]
ABOVE: Final = 1
BELOW: Final = -1

# The largest share that is ever bet, and the players' stakes for a block of weight 1.
MOST_BET: Final = 0.95
STAKES: Final = tuple(MOST_BET / 2**player for player in range(7))
# What a player wins past this stays out of the game, so that no float overflows.
MOST_WEALTH: Final = 1e200


class Wealth:
    """Keep what seven players have who bet against one claim, having begun with 1."""

    def __init__(self, null: float, side: Side) -> None:
        """Bet that the difference is on `side` of `null`, against the claim that it is not."""
        self._null = null
        self._side = side
        self._parts = [1.0] * len(STAKES)

    @property
    def value(self) -> float:
        """Return the players' mean: at 1/α the claim is refuted, wrongly with probability ≤ α."""
        return sum(self._parts) / len(STAKES)

    def update(self, block: Block) -> None:
        """Settle the bets on one block."""
        self._settle(block, 0.0)

    def _settle(self, block: Block, more: float) -> None:
        """Put `more` at stake for each player, and settle the bets on one block."""
        won = _odds(block, self._null, self._side)
        self._parts = [
            min((part + more) * (1 + bet * won), MOST_WEALTH)
            for part, bet in zip(self._parts, _bets(block.weight), strict=True)
        ]


class LateWealth(Wealth):
    """Keep the wealth of players who put 1/(t(t+1)) of what they have at stake from block t on.

    A claim that was true for long, and is not any more, is refuted soon after; the shares sum to
    1, so that its wealth has a mean of at most 1 as well. Its recursion is Shiryaev's and
    Roberts', with weights whose sum is finite; see Shin, Ramdas & Rinaldo, "E-detectors", 2024.
    """

    def __init__(self, null: float, side: Side) -> None:
        """Bet as `Wealth` does, and begin anew with each block."""
        super().__init__(null, side)
        self._parts = [0.0] * len(STAKES)
        self._blocks = 0

    @property
    def value(self) -> float:
        """Return the players' mean, with what is not at stake yet."""
        return super().value + 1 / (self._blocks + 1)

    def update(self, block: Block) -> None:
        """Put the next part at stake, and settle the bets on one block."""
        self._blocks += 1
        self._settle(block, 1 / (self._blocks * (self._blocks + 1)))


def log_wealth(blocks: Iterable[Block], null: float, side: Side) -> float:
    """Return the logarithm of what `Wealth` has after these blocks (for nulls not known before)."""
    odds = [(_odds(block, null, side), _bets(block.weight)) for block in blocks]
    logs = [
        fsum([log1p(bets[player] * won) for won, bets in odds]) for player in range(len(STAKES))
    ]
    most = max(logs)
    return most + log(fsum([exp(one - most) for one in logs]) / len(logs))


# Blocks of one size have few weights, and each is bet on for many nulls.
@lru_cache(maxsize=4096)
def _bets(weight: float) -> tuple[float, ...]:
    """Return the players' stakes for a block of this weight."""
    return tuple([min(stake * weight, MOST_BET) for stake in STAKES])


def _odds(block: Block, null: float, side: Side) -> float:
    """Return what a bet of 1 wins: −1 at worst, and 0 on average if the difference is the null."""
    return side * (block.difference - null) / (block.reach + side * null)
