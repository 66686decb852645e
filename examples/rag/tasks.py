"""Make questions about the invented towns, each with its answer; the same seed makes the same ones.

Three of four need one fact, the fourth needs two. Training and held-out questions are about
different towns: a hash of a town's name decides the split of its questions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator

from facts import QUESTIONS, RELATIONS, TWO_HOP_QUESTION, Town, towns

SPLITS = ("train", "held-out")
# One town in this many is held out.
HELD_OUT_SHARE = 5
TWO_HOPS = "two hops"
# Each of the four relations three times, and four questions that need two facts.
KINDS = (*RELATIONS * 3, *(TWO_HOPS,) * 4)


def split_of(town: str) -> str:
    digest = hashlib.sha256(town.encode()).digest()
    return "held-out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def make_question(town: Town, kind: str) -> tuple[str, str]:
    """Return a question about a town, and its answer."""
    if kind == TWO_HOPS:
        return TWO_HOP_QUESTION.format(town=town.name), town.mayor_born_in
    return QUESTIONS[kind].format(town=town.name), town.known[kind]


def kinds_in_turn(rng: random.Random) -> Iterator[str]:
    while True:
        yield from rng.sample(KINDS, len(KINDS))


def tasks(count: int, seed: int, split: str) -> list[dict[str, object]]:
    """Return `count` questions of one split; once there are no new questions, some come again."""
    rng = random.Random(f"{split}-{seed}")
    places = [town for town in towns() if split_of(town.name) == split]
    left: dict[str, list[Town]] = {}
    made: list[dict[str, object]] = []
    for kind, number in zip(kinds_in_turn(rng), range(count), strict=False):
        if not left.get(kind):
            left[kind] = rng.sample(places, len(places))
        question, answer = make_question(left[kind].pop(), kind)
        name = f"{split}-{seed}-{number}"
        made.append({"id": name, "kind": kind, "question": question, "answer": answer})
    return made


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
