"""Show explained credit on standard output, as JSON lines or as a table."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from pawl.crediting.explain import Explained
from pawl.output import cell, write_lines
from trainer.credit.lines import CreditLine


def write(explained: Explained, *, as_json: bool) -> None:
    """Write lines to standard output and notes to standard error.

    A terminal gets a table unless `as_json`; anything else gets JSON lines, in a single write.
    """
    for note in explained.notes:
        print(f"pawl: {note}", file=sys.stderr)
    write_lines(explained.lines, table, as_json=as_json)


def table(lines: Sequence[CreditLine]) -> Table:
    """Return the lines as a table for a terminal, one column for each field that any line has."""
    grid = Table(box=None, pad_edge=False)
    names = [name for name in CreditLine.__struct_fields__ if _has(lines, name)]
    for name in names:
        is_number = name.startswith("r_") or name in ("advantage", "weight")
        grid.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for line in lines:
        grid.add_row(*[cell(_shown(getattr(line, name))) for name in names])
    return grid


def _has(lines: Sequence[CreditLine], name: str) -> bool:
    return name != "parts" or any(line.parts for line in lines)


def _shown(value: Any) -> Any:
    """Return a value as the table has it: of the parts of a reward each with its metric."""
    if value is msgspec.UNSET:
        return None
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{metric} {part:+.4g}" for metric, part in value.items())
