"""Explain the credit of each transition of a file, as the trainer would compute it."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainer.credit.lines import CreditLine, credit_lines, read_lines
from trainer.errors import CreditLineError
from trainer.recipes.recipe import Recipe


class Explained(msgspec.Struct, frozen=True):
    """Hold the credit of some transitions, with notes on how to read it.

    Attributes:
        lines: one for each transition, in the order of episodes and calls.
        notes: warnings for the user, one line each; they go to standard error.
    """

    lines: Sequence[CreditLine]
    notes: Sequence[str]


def explain_file(file: str, recipe: Recipe) -> Explained:
    """Assign credit to the episodes in a file, or on standard input if `file` is `-`.

    Raises:
        CreditLineError: the file cannot be read, or a line is not an episode as `pawl export`
            writes it.
    """
    if file == "-":
        episodes = read_lines(sys.stdin.buffer, "standard input")
    else:
        try:
            with Path(file).open("rb") as lines:
                episodes = read_lines(lines, file)
        except OSError as error:
            raise CreditLineError(
                f"{file} cannot be read: {error.strerror}; name a file that `pawl export` wrote"
            ) from error
    credited = credit_lines(episodes, recipe.credit, recipe.kept, recipe.reward_rule)
    return Explained(credited, [])
