"""Define the toy task: three tools in a chain, and a reward for its right end alone (pure).

A task gives two keys. `lookup` turns a key into a value, `convert` a value into a result,
`submit` hands a result in and ends the episode. All of this works with either key, and the
final reward is 1 for the first one's result: what the tools tell is not what is wanted.
`note`, where a task has it, takes any word, always works, and is good for nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from store.records import ToolStatus

KEYS: Final = tuple(f"k{number}" for number in range(10))
VALUES: Final = tuple(f"v{number}" for number in range(10))
RESULTS: Final = tuple(f"r{number}" for number in range(10))
NOTE: Final = "note"
# What a tool takes, in the order of the chain.
TAKES: Final = {"lookup": KEYS, "convert": VALUES, "submit": RESULTS, NOTE: KEYS + VALUES + RESULTS}
CHAIN: Final = ("lookup", "convert", "submit")
END: Final = "end"
NOTHING: Final = "nothing"
STATUSES: Final = ("ok", "error", "malformed")
WORDS: Final = (
    ("pad", "begin", "call", "result", NOTHING, END) + STATUSES + tuple(TAKES) + TAKES[NOTE]
)
# A call is a name, an argument, and the end; one that goes on is cut off.
CALL_WORDS: Final = 4


@dataclass(frozen=True, slots=True)
class Task:
    """Define what an episode is about; `answers` are what tools would say to each key in turn."""

    name: str
    tools: tuple[str, ...]
    turns: int
    keys: tuple[str, str]
    answers: tuple[tuple[str, str], tuple[str, str]]

    @property
    def prompt(self) -> tuple[str, ...]:
        """Return the words before the first call."""
        return ("begin", *self.keys, "call")


@dataclass(frozen=True, slots=True)
class State:
    """Note where an episode stands: the words that the task and its tools gave so far."""

    given: frozenset[str]
    turn: int = 0
    ended: bool = False
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """State what came of one call."""

    state: State
    tool: str
    arguments: str
    status: ToolStatus
    answer: str = NOTHING

    @property
    def reply(self) -> tuple[str, ...]:
        """Return the words between this call and the next."""
        return ("result", self.status, self.answer, "call")


def new_task(name: str, tools: Sequence[str], turns: int, draw: random.Random) -> Task:
    """Make a task of fresh words."""
    keys = draw.sample(KEYS, 2)
    values = draw.sample(VALUES, 2)
    results = draw.sample(RESULTS, 2)
    return Task(
        name=name,
        tools=tuple(tools),
        turns=turns,
        keys=(keys[0], keys[1]),
        answers=((values[0], results[0]), (values[1], results[1])),
    )


def begin(task: Task) -> State:
    """Begin with nothing known but the keys."""
    return State(given=frozenset(task.keys))


def take(task: Task, state: State, said: Sequence[str]) -> Outcome:
    """Apply the words `said` (one or more): always a call, be it of no known tool."""
    after = replace(state, turn=state.turn + 1, ended=state.turn + 1 >= task.turns)
    tool, arguments = said[0], " ".join(word for word in said[1:] if word != END)
    taken = TAKES[tool] if tool in task.tools else ()
    if len(said) != 3 or said[2] != END or said[1] not in taken:
        return Outcome(after, tool, arguments, "malformed")
    if tool == NOTE:
        return Outcome(after, tool, arguments, "ok")
    if arguments not in state.given:
        return Outcome(after, tool, arguments, "error")
    return _worked(task, after, tool, arguments)


def _worked(task: Task, after: State, tool: str, word: str) -> Outcome:
    if tool == "submit":
        reward = float(word == task.answers[0][1])
        return Outcome(replace(after, ended=True, reward=reward), tool, word, "ok")
    known = list(task.keys) if tool == "lookup" else [value for value, _ in task.answers]
    answer = task.answers[known.index(word)][CHAIN.index(tool)]
    return Outcome(replace(after, given=frozenset({answer})), tool, word, "ok", answer)
