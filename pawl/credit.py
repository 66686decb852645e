"""`pawl credit`: the credit of each transition of a file of episodes, as JSON lines or a table."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.air import STEP_WARNING
from trainer.credit.lines import CreditLine, credit_lines, read_lines
from trainer.errors import CreditLineError
from trainer.recipe import Recipe


class Explained(msgspec.Struct, frozen=True):
    """The lines, and what else is to be known of them."""

    lines: Sequence[CreditLine]
    notes: Sequence[str]


def explain_file(file: str, recipe: Recipe) -> Explained:
    """The credit of the episodes in a file, or in what comes in where it is `-`.

    Raises:
        CreditLineError: it cannot be read, or a line of it is not as `pawl export` writes it.
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
    """What a reader should know of the recipe."""
    return [STEP_WARNING] if recipe.credit.air_assignment == "step" else []


def write(explained: Explained, *, as_json: bool) -> None:
    """Lines to standard output, at once and whole; notes to standard error."""
    for note in explained.notes:
        print(f"pawl: {note}", file=sys.stderr)
    if as_json or not sys.stdout.isatty():
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in explained.lines)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        Console().print(table(explained.lines))


def table(lines: Sequence[CreditLine]) -> Table:
    """The same for people."""
    found = Table(box=None, pad_edge=False)
    for name in CreditLine.__struct_fields__:
        in_figures = name.startswith("r_") or name in ("advantage", "weight")
        found.add_column(
            name,
            justify="right" if in_figures else "left",
            no_wrap=in_figures,
            overflow="fold",
        )
    for line in lines:
        found.add_row(*[_cell(value) for value in msgspec.structs.astuple(line)])
    return found


def _cell(value: Any) -> Text:
    """Names are whatever an agent gave: never read as markup."""
    if value is None:
        return Text()
    return Text(f"{value:.4f}" if isinstance(value, float) else str(value))
