"""Define what every framework is made to do; no program beside this knows of Pawl.

The programs set no setting of their framework's but what a row is about, and the numbers of tokens
and turns, because a small model rambles. The first argument is a number of the program's own, from
which its questions follow: two agents seldom have the same tasks, and who sent a conversation that
names no session can only be told by its words.
"""

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

MODEL = "agent"
TOKENS = 64
INSTRUCTIONS = "Use the calculator."
# A model of 135M parameters writes a tool call only if it is shown the form: each has a question
# and an answer, which stand in the conversation before what is asked.
EXAMPLES = (
    ("What is 23 * 47?", '[calculator(expression="23 * 47")]'),
    ("What is 65 + 12 * 8?", '[calculator(expression="65 + 12 * 8")]'),
    ("What is 31 * 4 + 2?", '[calculator(expression="31 * 4 + 2")]'),
)
COUNT = 20
FIRST = 12 + COUNT * int(sys.argv[1])
QUESTIONS = tuple(
    f"What is {first} * {first + 5} + {first % 7}?" for first in range(FIRST, FIRST + COUNT)
)


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, + and *.
    """
    try:
        terms = [map(int, term.split("*")) for term in expression.split("+")]
        return str(sum(map(math.prod, terms)))
    except ValueError:
        return "That is no expression of integers, + and *."


def search(query: str) -> str:
    """Search an encyclopedia.

    Args:
        query: what is looked for.
    """
    return f"There is no article on {query}."


def messages(question: str) -> list[dict[str, str]]:
    """Return the examples and a question, as most APIs take them."""
    told = []
    for asked, answered in EXAMPLES:
        told.append({"role": "user", "content": asked})
        told.append({"role": "assistant", "content": answered})
    return [*told, {"role": "user", "content": question}]


async def ask_all(ask: Callable[[str], Awaitable[object]]) -> None:
    """Ask all questions at once, and print how many runs failed, by error.

    A small model often fails as an agent; its calls were made all the same. Each kind of error has
    the words of its first.
    """
    ends = await asyncio.gather(*map(ask, QUESTIONS), return_exceptions=True)
    failed = [end for end in ends if isinstance(end, Exception)]
    words = {type(end): f"{type(end).__name__}: {end}"[:200] for end in reversed(failed)}
    print(json.dumps(Counter(words[type(end)] for end in failed)))
