"""Make arithmetic problems, each with its answer; the same seed makes the same ones.

Half of them state an expression, half tell a little story of one step. Training and held-out
problems share no combination of numbers: a hash of a problem's numbers decides its split.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Callable
from typing import NamedTuple

SPLITS = ("train", "held-out")
# One combination of numbers in this many is held out.
HELD_OUT_SHARE = 8


class Kind(NamedTuple):
    name: str
    text: str
    answer: Callable[[int, int, int], int]


KINDS = (
    Kind("direct", "What is {a} * {b}?", lambda a, b, c: a * b),
    Kind("direct", "What is {a} + {b} * {c}?", lambda a, b, c: a + b * c),
    Kind("direct", "What is {a} * {c} - {b}?", lambda a, b, c: a * c - b),
    Kind("direct", "Work out {a} * {c} + {b}.", lambda a, b, c: a * c + b),
    Kind(
        "story",
        "A crate holds {a} apples. How many apples are in {c} crates?",
        lambda a, b, c: a * c,
    ),
    Kind("story", "One book costs {a} coins. What do {b} books cost?", lambda a, b, c: a * b),
    Kind(
        "story",
        "A shop sold {a} cakes, and then {b} more. How many in all?",
        lambda a, b, c: a + b,
    ),
    Kind("story", "Ann has {m} stamps and gives away {b}. How many are left?", lambda a, b, c: a),
)


def split_of(question: str) -> str:
    """Return the split of a problem by the numbers in it; their order does not count."""
    numbers = sorted(int(digits) for digits in re.findall(r"\d+", question))
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return "held-out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def make_question(rng: random.Random, kind: Kind) -> tuple[str, int]:
    a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(3, 9)
    return kind.text.format(a=a, b=b, c=c, m=a + b), kind.answer(a, b, c)


def tasks(count: int, seed: int, split: str) -> list[dict[str, object]]:
    """Return `count` different problems of one split, equally many of each kind."""
    rng = random.Random(f"{split}-{seed}")
    made: dict[str, dict[str, object]] = {}
    while len(made) < count:
        for kind in rng.sample(KINDS, len(KINDS)):
            question, answer = make_question(rng, kind)
            while question in made or split_of(question) != split:
                question, answer = make_question(rng, kind)
            name = f"{split}-{seed}-{len(made)}"
            made[question] = {"id": name, "kind": kind.name, "question": question, "answer": answer}
    return list(made.values())[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=SPLITS, default="train")
    options = parser.parse_args()
    for task in tasks(options.count, options.seed, options.split):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
