"""Make what is trained: groups that share a prompt, a thread of many turns, random trees."""

import random
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from msgspec.structs import replace

from store.values.distribution import Distribution
from trainer.batches.rows import Row


class Size(NamedTuple):
    """Set the size of groups, and of a thread; `quick` is for a test."""

    groups: int
    members: int
    prompt: int
    sampled: int
    turns: int
    turn: int


PLAIN = Distribution(temperature=1.0)
COOL = Distribution(temperature=0.7)
FULL = Size(groups=16, members=8, prompt=130, sampled=22, turns=20, turn=50)
QUICK = Size(groups=2, members=4, prompt=24, sampled=6, turns=4, turn=12)


def groups(size: Size, words: Sequence[int]) -> list[Row]:
    """Make `groups` × `members` rows; a group has one prompt of about `prompt` tokens."""
    dice = random.Random(0)
    rows = []
    for _ in range(size.groups):
        prompt = _ids(dice, words, size.prompt + dice.randint(-8, 8))
        for _ in range(size.members):
            length = size.sampled + dice.randint(-size.sampled // 4, size.sampled // 4)
            rows.append(_row(dice, prompt, _ids(dice, words, length)))
    return _weighted(rows)


def thread(size: Size, words: Sequence[int]) -> list[Row]:
    """Make one conversation: each turn's prompt is all that was before it."""
    dice = random.Random(1)
    rows = []
    said = _ids(dice, words, size.prompt)
    for _ in range(size.turns):
        sampled = _ids(dice, words, size.sampled)
        rows.append(_row(dice, said, sampled))
        said = said + sampled + _ids(dice, words, size.turn - size.sampled)
    return _weighted(rows)


def random_tree(seed: int, vocabulary: int) -> list[Row]:
    """Make rows that fork anywhere, of mixed temperature, some the same, some without a fellow."""
    dice = random.Random(seed)
    words = random_words(vocabulary)
    known: list[tuple[int, ...]] = [()]
    rows = []
    for _ in range(dice.randint(2, 12)):
        stem = dice.choice(known)
        prompt = stem[: dice.randint(0, len(stem))] + _ids(dice, words, dice.randint(1, 8))
        sampled = _ids(dice, words, dice.randint(1, 8))
        rows.append(_row(dice, prompt, sampled, dice.choice([COOL, PLAIN])))
        known.append(prompt + sampled)
    return _weighted(rows)


def random_words(vocabulary: int) -> list[int]:
    """Draw ids for models that were never taught a text."""
    dice = random.Random(0)
    return [dice.randrange(vocabulary) for _ in range(10_000)]


def _ids(dice: random.Random, words: Sequence[int], count: int) -> tuple[int, ...]:
    """Cut a piece of `words`, from anywhere."""
    start = dice.randrange(len(words) - count)
    return tuple(words[start : start + count])


def _row(
    dice: random.Random,
    prompt: tuple[int, ...],
    sampled: tuple[int, ...],
    distribution: Distribution = PLAIN,
) -> Row:
    return Row(
        episode_id=UUID(int=dice.getrandbits(128)),
        agent="default",
        position=0,
        prompt_ids=prompt,
        sampled_ids=sampled,
        sampled_logprobs=tuple(dice.uniform(-8, -1) for _ in sampled),
        distribution=distribution,
        r_total=0.0,
        advantage=dice.choice([-1.0, 1.0]) * dice.uniform(0.2, 2),
        weight=1.0,
        version=0,
    )


def _weighted(rows: Sequence[Row]) -> list[Row]:
    """Give each row the same share of the loss."""
    return [replace(row, weight=1 / len(rows)) for row in rows]
