"""Make the episodes of a day: long and short tasks, tried several times, and scored late."""

from random import Random
from typing import Final

from store.records import Record

DAY_S: Final = 86_400.0


class Load(Record, frozen=True, kw_only=True):
    """Define how many episodes there are, how long they take, and how late a judge scores them.

    A task is tried `attempts` times within `spread_s` seconds. It has a length of its own, which
    its attempts differ from by a fifth at most, and a chance to succeed.
    """

    episodes: int = 100_000
    seconds: float = DAY_S
    shortest_s: float = 120.0
    longest_s: float = 1800.0
    latest_s: float = 600.0
    attempts: int = 8
    spread_s: float = 600.0


class Episode:
    """Hold one attempt at a task, and what became of it.

    `version` is the one that it began with; `fate` is None while it waits.
    """

    __slots__ = ("begun", "fate", "lag", "length", "number", "reward", "scored", "task", "version")

    def __init__(
        self, number: int, task: int, begun: float, length: float, scored: float, reward: float
    ) -> None:
        """Begin without a version, which is known once the episode begins."""
        self.number = number
        self.task = task
        self.begun = begun
        self.length = length
        self.scored = scored
        self.reward = reward
        self.version = 0
        self.lag = 0
        self.fate: str | None = None

    @property
    def ended(self) -> float:
        """Return when its last call ends."""
        return self.begun + self.length


def make_episodes(load: Load, seed: int) -> list[Episode]:
    """Return the episodes in the order in which they begin; the same seed gives the same ones."""
    chance = Random(seed)
    made: list[Episode] = []
    for task in range(load.episodes // load.attempts):
        first = chance.uniform(0.0, load.seconds)
        usual = chance.uniform(load.shortest_s, load.longest_s)
        success = chance.random()
        for _ in range(load.attempts):
            begun = first + chance.uniform(0.0, load.spread_s)
            wanted = usual * chance.uniform(0.8, 1.2)
            length = min(load.longest_s, max(load.shortest_s, wanted))
            scored = begun + length + chance.uniform(0.0, load.latest_s)
            reward = float(chance.random() < success)
            made.append(Episode(len(made), task, begun, length, scored, reward))
    return sorted(made, key=lambda one: (one.begun, one.number))
