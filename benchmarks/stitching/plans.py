"""Plan what `benchmarks.stitching` has agents do: turns, and the replies they get.

Every kind of run that a client can be told apart by, or not: tools, plain chat, first turns
that are equal to the letter, whole runs that differ in nothing but their tool calls' ids, an
attempt that fails and is sent again.
"""

from random import Random
from typing import Any, Final

import msgspec

CLIENTS: Final = ("openai", "langchain", "agents", "autogen", "anthropic")
# Of a hundred episodes of each client. `alike` begins as others do: its second call can be
# told from theirs by nothing.
KINDS: Final = (("tools", 40), ("twins", 20), ("chat", 29), ("retried", 10), ("alike", 1))


class Call(msgspec.Struct, frozen=True):
    """Plan a tool call within a reply."""

    id: str
    name: str
    arguments: dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """Plan one reply; `attempts` before it fail."""

    text: str
    calls: tuple[Call, ...] = ()
    attempts: int = 0


class Turn(msgspec.Struct, frozen=True):
    """Plan a user's words, and the replies until the next."""

    question: str
    replies: tuple[Reply, ...]


class Plan(msgspec.Struct, frozen=True):
    """Plan one episode: who runs it, and what is said."""

    client: str
    kind: str
    turns: tuple[Turn, ...]

    @property
    def replies(self) -> list[Reply]:
        """Return all replies in order."""
        return [reply for turn in self.turns for reply in turn.replies]


def make_plan(client: str, kind: str, number: int, random: Random) -> Plan:
    """Make the plan of episode `number`, its tool calls' ids as vLLM makes them: random."""
    name = f"run {number}"
    if kind == "chat":
        turns = [_talk(f"{name}, question {turn}", f"Answer {turn} of {name}.") for turn in "123"]
    elif kind == "alike":
        turns = [_talk("hi", "Hello! How can I help you today?")]
        turns += [_talk(f"{name}, question {turn}", f"Answer {turn} of {name}.") for turn in "23"]
    else:
        same = kind == "twins"
        about = "the sum" if same else name
        turns = [
            Turn(f"What is {about}?", _tool_replies("" if same else name, random, kind)),
            _talk("And twice that?", "It is 10." if same else f"Twice {name} is 10."),
        ]
    return Plan(client, kind, tuple(turns))


def _talk(question: str, answer: str) -> Turn:
    return Turn(question, (Reply(answer),))


def _tool_replies(name: str, random: Random, kind: str) -> tuple[Reply, ...]:
    """Reply with one call, then two beside each other with some words, then the answer."""
    return (
        Reply("", (_call(random, "add", a=2, b=2.0),), attempts=int(kind == "retried")),
        Reply(
            "I shall check that.\n",
            (_call(random, "add", a=4, b=1), _call(random, "look_up", word=f"ä {name}")),
        ),
        Reply(f"It is 5 {name}".strip() + "."),
    )


def _call(random: Random, name: str, **arguments: Any) -> Call:
    return Call(f"chatcmpl-tool-{random.getrandbits(128):032x}", name, arguments)


def make_plans(episodes: int, seed: int) -> list[Plan]:
    """Make as many plans for every client, of all kinds in their shares."""
    random = Random(seed)
    share = [kind for kind, count in KINDS for _ in range(count)]
    return [
        make_plan(CLIENTS[number % len(CLIENTS)], random.choice(share), number, random)
        for number in range(episodes)
    ]
