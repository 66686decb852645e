"""Make tasks from the leaderboard's entries; a hash of an entry's id decides its split.

Categories take turns, so that a category with more tasks is not learned at the cost of the others.
Once a category has no new tasks, its tasks come again under new names. Held-out tasks come once
each, with temperature 0, as the leaderboard has it. BFCL_CATEGORIES names the categories,
comma-separated; by default all categories of one turn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from collections.abc import Iterator
from typing import Any

from leaderboard import ONE_TURN, SEVERAL_TURNS, entries

SPLITS = ("train", "held-out")


def split_of(entry: str) -> str:
    return SPLITS[hashlib.sha256(entry.encode()).digest()[0] % 2]


def tasks_of_category(category: str, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield a category's tasks of one split in random order, repeatedly unless held out."""
    rng = random.Random(f"{category}-{split}-{seed}")
    known = [one for one in entries(category) if split_of(one["id"]) == split]
    passes = 0
    while known and not (passes and split == "held-out"):
        for number in rng.sample(range(len(known)), len(known)):
            yield task_of(known[number], category, split, passes)
        passes += 1


def task_of(entry: dict[str, Any], category: str, split: str, passes: int) -> dict[str, Any]:
    again = f"~{passes}" if passes else ""
    question = entry["question"]
    return {
        **entry,
        "id": f"{category}/{entry['id'].rpartition(category)[2].strip('_')}{again}",
        "entry": entry["id"],
        "category": category,
        "question": question if category in SEVERAL_TURNS else question[0],
        "temperature": 0.0 if split == "held-out" else 1.0,
    }


def tasks(count: int, seed: int, split: str, categories: list[str]) -> Iterator[dict[str, Any]]:
    """Yield at most `count` tasks; the categories take turns while they have tasks."""
    left = [tasks_of_category(category, seed, split) for category in categories]
    while left and count:
        for one in list(left):
            task = next(one, None)
            if task is None:
                left.remove(one)
            elif count:
                yield task
                count -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=SPLITS, default="train")
    options = parser.parse_args()
    named = os.environ.get("BFCL_CATEGORIES")
    categories = named.split(",") if named else list(ONE_TURN)
    if unknown := set(categories) - {*ONE_TURN, *SEVERAL_TURNS}:
        known = ", ".join((*ONE_TURN, *SEVERAL_TURNS))
        parser.error(f"BFCL_CATEGORIES: there is no {unknown.pop()!r}: name some of {known}")
    for task in tasks(options.count, options.seed, options.split, categories):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
