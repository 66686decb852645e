"""Define two kinds of task, the arms compared on each, and what is looked at (pure)."""

from dataclasses import dataclass
from typing import Final

from benchmarks.air.task import CHAIN, NOTE


@dataclass(frozen=True, slots=True)
class World:
    """Define a kind of task, and how well the base model knows it."""

    name: str
    tools: tuple[str, ...]
    turns: int
    # How often the base model's teacher makes the right call, and a note instead of any other.
    skill: float
    notes: float
    # An update trains on so many groups, and there are so many updates.
    groups: int
    waves: int


@dataclass(frozen=True, slots=True)
class Arm:
    """Define how reward is made.

    `unbounded` is no recipe of ours: `air_lambda` times the plain sum of all tool scores, as if
    nobody had thought of heaps of easy calls.
    """

    name: str
    air_lambda: float
    unbounded: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """Look at the policy on the held-out tasks, after so many episodes; means of episodes."""

    episodes: int
    r_final: float
    calls: float
    notes: float


SPARSE: Final = World("sparse", CHAIN, turns=4, skill=0.06, notes=0.0, groups=4, waves=80)
EASY: Final = World("easy", (*CHAIN, NOTE), turns=10, skill=0.25, notes=0.3, groups=8, waves=24)

WITH: Final = Arm("AIR", 0.2)
WITHOUT: Final = Arm("no AIR", 0.0)
UNBOUNDED: Final = Arm("sum of scores", 0.2, unbounded=True)

ARMS: Final = {SPARSE.name: (WITH, WITHOUT), EASY.name: (WITH, WITHOUT, UNBOUNDED)}
