"""Find which logits an update needs: tokens that were sampled alike share them (pure)."""

from collections.abc import Sequence
from typing import NamedTuple

from store.values.distribution import Distribution
from trainer.batches import Row


class Group(NamedTuple):
    """Name the places [start, stop) whose distribution is shaped by more than a temperature.

    `histories` are, for each, the number of a row and how many of its sampled tokens come before.
    """

    start: int
    stop: int
    distribution: Distribution
    histories: tuple[tuple[int, int], ...]


class Places(NamedTuple):
    """Hold the R distributions that M sampled tokens were drawn from, the plain ones first.

    Shapes: `nodes` and `temperatures` are (R,): the tree's node that a token follows, and its
    temperature; `of_tokens` (M,) are the tokens' places, row after row.
    """

    nodes: list[int]
    temperatures: list[float]
    of_tokens: list[int]
    groups: tuple[Group, ...]


# The number of a distribution, a node, and where the reply begins if that matters.
_Key = tuple[int, int, int]


def places_of(rows: Sequence[Row], parents: Sequence[int]) -> Places:
    """Return the places of the sampled tokens of `rows`; `parents` (M,) are the nodes before them.

    Two tokens after one node have one place if their settings are equal and, where these look
    back, their replies begin at one node.
    """
    settings = sorted({row.distribution for row in rows}, key=_plain_first)
    number = {distribution: index for index, distribution in enumerate(settings)}
    keys: list[_Key] = []
    first: dict[_Key, tuple[int, int]] = {}
    for index, row in enumerate(rows):
        begins = len(row.prompt_ids) if row.distribution.needs_history else 0
        alike = number[row.distribution]
        for sampled in range(len(row.sampled_ids)):
            key = (alike, parents[len(keys)], begins)
            keys.append(key)
            first.setdefault(key, (index, sampled))
    ordered = sorted(first)
    place = {key: index for index, key in enumerate(ordered)}
    return Places(
        nodes=[node for _, node, _ in ordered],
        temperatures=[settings[alike].temperature for alike, _, _ in ordered],
        of_tokens=[place[key] for key in keys],
        groups=_groups(settings, ordered, [first[key] for key in ordered]),
    )


def _plain_first(distribution: Distribution) -> tuple[bool, str]:
    """Return a sort key that is the same in every process."""
    return not distribution.is_plain, repr(distribution)


def _groups(
    settings: Sequence[Distribution],
    ordered: Sequence[_Key],
    histories: Sequence[tuple[int, int]],
) -> tuple[Group, ...]:
    groups = []
    stop = sum(1 for alike, _, _ in ordered if settings[alike].is_plain)
    while stop < len(ordered):
        start, alike = stop, ordered[stop][0]
        while stop < len(ordered) and ordered[stop][0] == alike:
            stop += 1
        groups.append(Group(start, stop, settings[alike], tuple(histories[start:stop])))
    return tuple(groups)
