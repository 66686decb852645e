"""Write a command's result: a table to a terminal, JSON lines to anything else."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from store.records import Record

Line = TypeVar("Line", bound=Record)


def write_lines(
    lines: Sequence[Line], table: Callable[[Sequence[Line]], Table], *, as_json: bool
) -> None:
    """Write to standard output: `table` of the lines to a terminal, JSON lines if `as_json`."""
    if as_json or not sys.stdout.isatty():
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        Console().print(table(lines))


def cell(value: Any) -> Text:
    """Return a value as plain text: clients choose many names, so rich must not read markup."""
    if value is None:
        return Text()
    return Text(f"{value:.4f}" if isinstance(value, float) else str(value))
