"""Define who speaks in an episode, and which policy answers."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

# The base model, as the model server lists it.
BASE: Final = "tiny"
FIXED: Final = "rest"


class Agent(NamedTuple):
    """Name an agent; `policy` is None if an outside model answers it."""

    name: str
    policy: str | None
    trained: bool = True


ALONE: Final = Agent("default", BASE)
WRITER: Final = Agent("writer", "writer")
CHECKER: Final = Agent("checker", "checker")
REWRITER: Final = Agent("rewriter", FIXED, trained=False)
PLANNER: Final = Agent("planner", None, trained=False)

# By the number of policies in training: the agents of an episode in the order in which they
# call. Episodes take these orders in turn.
CASTS: Final[Mapping[int, Sequence[Sequence[Agent]]]] = {
    1: ((ALONE,),),
    2: (
        (WRITER, CHECKER, REWRITER),
        (PLANNER, WRITER, CHECKER, REWRITER),
        (CHECKER, WRITER, REWRITER),
    ),
}
POLICIES_TOML: Final = f"""
[[policy]]
name = "{WRITER.policy}"
base = "{BASE}"
agents = ["{WRITER.name}"]
[[policy]]
name = "{CHECKER.policy}"
base = "{BASE}"
agents = ["{CHECKER.name}"]
[[policy]]
name = "{FIXED}"
base = "{BASE}"
models = ["{BASE}"]
trained = false
"""


def agents(policies: int) -> list[Agent]:
    """Return each of the agents in a ledger with so many policies in training, once."""
    return list(dict.fromkeys(agent for cast in CASTS[policies] for agent in cast))


def trained(policies: int) -> list[str]:
    """Return the names of so many policies in training."""
    return [agent.policy for agent in agents(policies) if agent.policy and agent.trained]
