"""Show explained credit on standard output, as JSON lines or as a table."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pawl.crediting.explain import Explained
from trainer.credit.lines import CreditLine


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
