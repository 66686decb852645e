"""Define what the gate is told of episodes, how strict it is, and what it decides."""

from math import isfinite
from typing import Final, Literal

import msgspec

from store.records import Arm

Kind = Literal["promote", "retire", "wait"]

# What a sum of floats may come to past an end of its range, as a share of the width.
ROUNDING: Final = 1e-9
# While more than this share of an arm's rewards is outside of the range, nothing is promoted.
MOST_CLIPPED: Final = 0.05

BASE: Final = "base"
SERVING: Final = "serving"
CANARY: Final = "canary"


class Episode(msgspec.Struct, frozen=True):
    """Hold what the gate needs of one episode; the order of a list is that of their first calls.

    Attributes:
        arm: the version it was given: the base model, what serves, or the canary.
        family: what its task is one of; tasks of one family are scored alike.
        reward: its reward, or None if nobody scored it.
        failed: whether a request of it failed. Without a reward it counts as the lowest one.
        malformed: whether a tool call of it was malformed; None if it called no tool.
        tools_failed: whether a tool that it called came to an error or a timeout; None likewise.
        seconds: how long its calls took, in a unit that all arms share; None if unknown.
        version: the number of the version that it was given.
    """

    arm: Arm
    family: str
    reward: float | None
    failed: bool = False
    malformed: bool | None = None
    tools_failed: bool | None = None
    seconds: float | None = None
    version: int = 0


class GateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Say how sure the gate must be; keys of a recipe's `[gate]` that it does not use are ignored.

    Attributes:
        canary_share: share of new episodes that the canary gets. It sizes the blocks, and nothing
            that is decided rests on it.
        base_share: likewise, of the base model.
        margin: how much lower, in units of the reward, a canary may score and still be promoted.
        reward_range: lowest and highest reward; others are clipped to it, and counted.
        mistakes: the greatest probability of retiring one that is as good, and of promoting one
            that is worse by the margin or more, over the whole life of the canary.
        fewest: scored episodes that each arm needs before a promotion.
        deadline_s: age at which a canary that is not promoted is retired.

    Raises:
        ValueError: one of them is out of its range.
    """

    canary_share: float = 0.1
    base_share: float = 0.02
    margin: float = 0.02
    reward_range: tuple[float, float] = (0.0, 1.0)
    mistakes: float = 0.05
    fewest: int = 50
    deadline_s: float = 86_400.0

    def __post_init__(self) -> None:
        """Check every option against its range."""
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
        if not (self.canary_share > 0 and self.base_share >= 0):
            raise ValueError("canary_share must be above 0, and base_share 0 or more")
        if not self.canary_share + self.base_share < 1:
            raise ValueError(
                f"canary_share {self.canary_share} and base_share {self.base_share} leave nothing"
                " to what serves; give shares whose sum is below 1"
            )

    @property
    def width(self) -> float:
        """Return the width of the range of rewards."""
        return self.reward_range[1] - self.reward_range[0]

    @property
    def scaled_margin(self) -> float:
        """Return the margin as a share of the range's width."""
        return self.margin / self.width

    def scaled(self, episode: Episode) -> float | None:
        """Return an episode's reward, clipped, as a place in the range: 0 to 1; None if unscored.

        Raises:
            ValueError: the reward is not a number.
        """
        if episode.reward is None:
            return 0.0 if episode.failed else None
        if episode.reward != episode.reward:
            raise ValueError("a reward is not a number (NaN); leave the episode unscored instead")
        low, high = self.reward_range
        return (min(max(episode.reward, low), high) - low) / (high - low)

    def clips(self, episode: Episode) -> bool:
        """Return whether an episode's reward is outside of the range, and counts as its end."""
        if episode.reward is None:
            return False
        (low, high), past = self.reward_range, ROUNDING * self.width
        return not low - past <= episode.reward <= high + past


class ArmFigures(msgspec.Struct, frozen=True):
    """Count what was seen of one arm.

    `mean` is of its scored episodes, in units of the reward; `clipped` of these have a reward that
    is outside of the range.
    """

    episodes: int
    unscored: int
    failed: int
    mean: float | None
    clipped: int = 0

    @property
    def clipped_share(self) -> float:
        """Return the share of the scored episodes whose reward is outside of the range."""
        return self.clipped / max(self.episodes - self.unscored, 1)


class GuardFigures(msgspec.Struct, frozen=True):
    """Say how often something went wrong in two arms, and how much speaks against the canary."""

    name: str
    canary: float | None
    serving: float | None
    wealth: float
    needed: float


class Decision(msgspec.Struct, frozen=True):
    """Say what is to be done with a canary, and all that it rests on (JSON as it is).

    Attributes:
        kind: `promote`, `retire`, or `wait` for more episodes.
        reason: why, in a sentence for people.
        lower: bound of the difference of rewards, canary − serving, in units of the reward. With
            probability 1 − `mistakes` it never was above the difference.
        upper: bound likewise, with probability 1 − `mistakes`/2, never below it.
        better: wealth against "worse by the margin or more"; at `better_needed` it is promoted.
        worse: wealth against "as good"; at `worse_needed` it is retired.
        arms: what was seen of each arm.
        guards: failed requests, malformed tool calls, failed tools, slowness, unscored episodes.
    """

    kind: Kind
    reason: str
    lower: float
    upper: float
    better: float
    better_needed: float
    worse: float
    worse_needed: float
    arms: dict[str, ArmFigures]
    guards: list[GuardFigures]
