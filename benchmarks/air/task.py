"""The toy task: three tools in a chain, and a reward only for the right result (pure).

A task gives two keys. `lookup` turns a key into a value, `convert` a value into a result,
`submit` hands a result in and ends the episode. All of this works with either key, but the
final reward is 1 only for the first key's result: working tools do not mean success.
`note`, if a task has it, takes any word, always works, and is useless.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from store.records import ToolStatus

KEYS, VALUES, RESULTS = (tuple(f"{letter}{number}" for number in range(10)) for letter in "kvr")
NOTE, END, NOTHING = "note", "end", "nothing"
CHAIN: Final = ("lookup", "convert", "submit")
# The arguments that a tool accepts, in the order of the chain.
TAKES: Final = {"lookup": KEYS, "convert": VALUES, "submit": RESULTS, NOTE: KEYS + VALUES + RESULTS}
STATUSES: Final = ("ok", "error", "malformed")
WORDS: Final = (
    *("pad", "begin", "call", "result", NOTHING, END, *STATUSES),
    *(*TAKES, *TAKES[NOTE]),
)
# A call is a name, an argument, and `END`; a longer call is cut off.
CALL_WORDS: Final = 4


@dataclass(frozen=True, slots=True)
class World:
    """A kind of task, and how well the base model knows it.

    The worker from whom the base model learns makes the right call with probability `skill`, and a
    note instead of any call with probability `notes`. There are `waves` updates on `groups` groups
    each.
    """

    name: str
    tools: tuple[str, ...]
    turns: int
    skill: float
    notes: float
    groups: int
    waves: int


SPARSE: Final = World("sparse", CHAIN, turns=4, skill=0.06, notes=0.0, groups=4, waves=80)
# Of six calls two are notes: success is as rare as in SPARSE.
BOTH: Final = World("both", (*CHAIN, NOTE), turns=6, skill=0.06, notes=0.3, groups=4, waves=80)
EASY: Final = World("easy", (*CHAIN, NOTE), turns=10, skill=0.25, notes=0.3, groups=8, waves=24)


@dataclass(frozen=True, slots=True)
class Task:
    """The task of an episode; `answers` has value and result for each key."""

    name: str
    world: World
    keys: Sequence[str]
    answers: Sequence[tuple[str, str]]

    @property
    def prompt(self) -> list[str]:
        """Return the words before the first call."""
        return ["begin", *self.keys, "call"]


@dataclass(frozen=True, slots=True)
class State:
    """The state of an episode; `given` are the words that a call may use now."""

    given: frozenset[str]
    turn: int = 0
    ended: bool = False
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one call: the new state, the parsed call, the tool's status and answer."""

    state: State
    tool: str
    arguments: str
    status: ToolStatus
    answer: str = NOTHING

    @property
    def reply(self) -> list[str]:
        """Return the words between this call and the next."""
        return ["result", self.status, self.answer, "call"]


def new_task(name: str, world: World, draw: random.Random) -> Task:
    """Make a task of random words."""
    keys, values, results = (draw.sample(words, 2) for words in (KEYS, VALUES, RESULTS))
    return Task(name, world, keys, list(zip(values, results, strict=True)))


def begin_state(task: Task) -> State:
    return State(given=frozenset(task.keys))


def apply_tool_call(task: Task, state: State, words: Sequence[str]) -> Outcome:
    """Apply the call of `words` (one or more); a call of an unknown tool is malformed."""
    after = replace(state, turn=state.turn + 1, ended=state.turn + 1 >= task.world.turns)
    tool, arguments = words[0], " ".join(word for word in words[1:] if word != END)
    taken = TAKES[tool] if tool in task.world.tools else ()
    if len(words) != 3 or words[2] != END or words[1] not in taken:
        return Outcome(after, tool, arguments, "malformed")
    if tool == NOTE:
        return Outcome(after, tool, arguments, "ok")
    if arguments not in state.given:
        return Outcome(after, tool, arguments, "error")
    if tool == "submit":
        reward = float(arguments == task.answers[0][1])
        return Outcome(replace(after, ended=True, reward=reward), tool, arguments, "ok")
    known = list(task.keys) if tool == "lookup" else [value for value, _ in task.answers]
    answer = task.answers[known.index(arguments)][CHAIN.index(tool)]
    return Outcome(replace(after, given=frozenset({answer})), tool, arguments, "ok", answer)
