"""Make arithmetic questions from a seed, as JSON lines.

The two splits cannot share a question: a hash of a question's numbers decides its split, so no
held-out question even has the numbers of a training one. The answer is written only with
--with-answers, for the judge; the agent gets the questions without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

Split = Literal["train", "held-out"]

# One set of numbers in this many is held out.
HELD_OUT_SHARE = 4

Rule = Callable[[int, int, int], int]


@dataclass(frozen=True)
class Kind:
    """A kind of question about {a}, {b} (two digits each) and {c} (one digit), with its result."""

    name: str
    text: str
    answer: Rule


@dataclass(frozen=True)
class Question:
    id: str
    kind: str
    question: str
    answer: int


def product(a: int, b: int, _: int) -> int:
    return a * b


def sum_with_product(a: int, b: int, c: int) -> int:
    return a + b * c


def product_less(a: int, b: int, c: int) -> int:
    return a * c - b


# Every run of len(KINDS) questions has each of these once, so that no seed is easier than another.
# Most state the expression and only word the request differently from the agent's examples: the
# model is to learn to call the tool and to copy the expression. README.md has the measurements.
KINDS = (
    Kind("work out", "Work out {a} * {b}.", product),
    Kind("work out", "Work out {a} + {b} * {c}.", sum_with_product),
    Kind("work out", "Work out {a} * {c} - {b}.", product_less),
    Kind("bare", "{a} * {b} = ?", product),
    Kind("bare", "{a} + {b} * {c} = ?", sum_with_product),
    Kind("how much", "How much is {a} * {c} - {b}?", product_less),
    Kind("multiply", "Multiply {a} by {b}.", product),
    Kind("cost", "One book costs {a} coins. What do {b} books cost?", product),
)


def split_of(question: str) -> Split:
    """Return the split of a question, by the numbers in it; their order does not count."""
    numbers = sorted(int(digits) for digits in re.findall(r"\d+", question))
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return "held-out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def drafts(rng: random.Random, kind: Kind) -> Iterator[tuple[str, int]]:
    """Yield questions of one kind, of either split, with their answers."""
    while True:
        a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(3, 9)
        yield kind.text.format(a=a, b=b, c=c), kind.answer(a, b, c)


def kinds_in_turn(rng: random.Random) -> Iterator[Kind]:
    while True:
        yield from rng.sample(KINDS, len(KINDS))


def questions(count: int, seed: int, split: Split) -> list[Question]:
    """Return `count` different questions of one split; the same seed gives the same ones."""
    rng = random.Random(f"{split}-{seed}")
    made: dict[str, Question] = {}
    for kind in islice(kinds_in_turn(rng), count):
        fresh = (d for d in drafts(rng, kind) if d[0] not in made and split_of(d[0]) == split)
        text, answer = next(fresh)
        made[text] = Question(f"{kind.name}/{split}-{seed}-{len(made)}", kind.name, text, answer)
    return list(made.values())


def record(question: Question, with_answer: bool) -> dict[str, str | int]:
    shown: dict[str, str | int] = {"id": question.id, "question": question.question}
    if with_answer:
        shown |= {"kind": question.kind, "answer": question.answer}
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=get_args(Split), default="train")
    parser.add_argument("--with-answers", action="store_true", help="for the judge, not the agent")
    options = parser.parse_args()
    for question in questions(options.count, options.seed, options.split):
        print(json.dumps(record(question, options.with_answers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
