"""Watch what no reward may buy: failed requests, malformed tool calls, failed tools, slowness.

And episodes without a reward: of those that are scored alone nobody knows what the others were.
"""

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final

from pawl.steward.gate.blocks import Blocks
from pawl.steward.gate.records import CANARY, SERVING, Arm, Episode, GuardFigures
from pawl.steward.gate.wealth import ABOVE, Wealth

# The share of episodes by which a canary must be worse before it can be retired for it.
MARGIN: Final = 0.05
# An episode is slow if it takes this many times the median of what serves.
SLOW: Final = 2.0
# The median is of the newest TIMES episodes of what serves, and is first taken of FIRST_TIMES.
TIMES: Final = 200
FIRST_TIMES: Final = 50


class Guard:
    """Bet that the canary's episodes go wrong in one way more often, by more than MARGIN."""

    def __init__(self, name: str, block_size: int, read: Callable[[Episode], bool | None]) -> None:
        """Watch what `read` says of an episode; None where it does not apply."""
        self._name = name
        self._read = read
        self._blocks = Blocks(block_size)
        self._wealth = Wealth(MARGIN, ABOVE)
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
            self._wealth.update(block)
        return block is not None

    def figures(self, needed: float) -> GuardFigures:
        """Return how often it went wrong in each arm, and how much speaks against the canary."""
        canary, serving = self._share(CANARY), self._share(SERVING)
        return GuardFigures(self._name, canary, serving, self._wealth.value, needed)

    @property
    def name(self) -> str:
        """Return what goes wrong, as a plural."""
        return self._name

    @property
    def wealth(self) -> float:
        """Return the wealth against "not worse by more than MARGIN"."""
        return self._wealth.value

    @property
    def speaks_against(self) -> bool:
        """Return whether the bets on it have won so far, though it may be by chance."""
        return self._wealth.value > 1

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
