"""`pawl credit`: shows the credit of each transition of a file, as JSON lines or as a table."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.credit.air import STEP_WARNING
from trainer.credit.lines import CreditLine, credit_lines, read_lines
from trainer.errors import CreditLineError
from trainer.recipes.recipe import Recipe


class Explained(msgspec.Struct, frozen=True):
    """The credit of some transitions, with notes on how to read it.

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
            raise CreditLineError(f"{file} cannot be read: {error.strerror}") from error
    return Explained(credit_lines(episodes, recipe.credit), warnings(recipe))


def warnings(recipe: Recipe) -> list[str]:
    """Return the warnings that a recipe's credit rules call for."""
    return [STEP_WARNING] if recipe.credit.air_assignment == "step" else []


def write(explained: Explained, *, as_json: bool) -> None:
    """Write lines to standard output and notes to standard error.

    A terminal gets a table unless `as_json`; anything else gets JSON lines, in a single write.
    """
    for note in explained.notes:
        print(f"pawl: {note}", file=sys.stderr)
    if as_json or not sys.stdout.isatty():
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in explained.lines)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        Console().print(table(explained.lines))


def table(lines: Sequence[CreditLine]) -> Table:
    """Return the lines as a table for a terminal, one column for each field."""
    grid = Table(box=None, pad_edge=False)
    for name in CreditLine.__struct_fields__:
        is_number = name.startswith("r_") or name in ("advantage", "weight")
        grid.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for line in lines:
        grid.add_row(*[_cell(value) for value in msgspec.structs.astuple(line)])
    return grid


def _cell(value: Any) -> Text:
    """Return a value as plain text: agents choose the names, so rich must not read markup."""
    if value is None:
        return Text()
    return Text(f"{value:.4f}" if isinstance(value, float) else str(value))
