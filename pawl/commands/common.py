"""Shared by several commands: common options, access to the database, and output."""

import asyncio
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, get_type_hints

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pawl.settings import StackSettings, read_settings
from store.records import Record
from store.tenants import PATTERN

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

Result = TypeVar("Result")
Flags = TypeVar("Flags")
Line = TypeVar("Line", bound=Record)

PolicyName = Annotated[str, typer.Argument(help="Name of the policy.", show_default=False)]
Since = Annotated[
    datetime | None,
    typer.Option(help="Only episodes with a call at or after this time."),
]
OfAgent = Annotated[str | None, typer.Option(help="Only episodes with calls of this agent.")]
OfPolicy = Annotated[str | None, typer.Option(help="Only episodes with calls of this policy.")]


def fail(message: str) -> NoReturn:
    """Print one line to standard error, and exit with status 2."""
    print(f"pawl: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_parent_folder(option: str, file: Path | None) -> None:
    """Exit with status 2 if the folder of an option's file, if given, does not exist."""
    if file is not None and not file.absolute().parent.is_dir():
        fail(f"{option}: there is no folder {file.absolute().parent}; make it, or name another")


def checked_tenant(name: str | None) -> str | None:
    """Return the value of `--tenant`, or exit with status 2 if it is not a valid tenant name."""
    if name is not None and not re.fullmatch(PATTERN, name):
        fail(
            f"--tenant: {name!r:.80} cannot be a tenant's name: write 1 to 64 letters, digits, "
            "'.', '_' and '-', the first of them a letter or a digit"
        )
    return name


# A filter, not a permission: whoever can read the database can read all tenants' data.
OfTenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        callback=checked_tenant,
        help="Only this tenant's data; default: every tenant's.",
    ),
]


AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON lines on a terminal too, not a table.")
]


def in_transaction(work: "Callable[[AsyncConnection], Awaitable[Result]]") -> Result:
    """Run `work` in a transaction, and return its result."""

    async def run(engine: "AsyncEngine") -> Result:
        async with engine.begin() as connection:
            return await work(connection)

    return run_with_engine(run)


def run_with_engine(work: "Callable[[AsyncEngine], Awaitable[Result]]") -> Result:
    """Run `work`, which makes its own transactions, and return its result."""
    # Imported here, as not every command opens the database.
    from pawl.database import open_engine

    async def run() -> Result:
        async with open_engine(read_settings(StackSettings), create=False) as engine:
            return await work(engine)

    return asyncio.run(run())


def require_torch() -> None:
    """Import torch, or exit with one line that has the remedy if it cannot be imported.

    Other import errors are faults of the code, and keep their traceback.
    """
    from pawl.stack.preflight import torch_failure

    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        fail(torch_failure(f"{type(error).__name__}: {error}"))


def with_zone(moment: datetime | None) -> datetime | None:
    """Return the time with a zone; one without a zone is taken as local time of this machine."""
    return moment.astimezone() if moment is not None and moment.tzinfo is None else moment


def with_flags(flags: type[Flags]) -> Callable[[Callable[[Flags], None]], Callable[..., None]]:
    """Make a function of a `flags` record a command, whose options are the record's fields.

    Typer reads a command's options from its signature, so the command gets the record's: a field's
    annotation describes the option, and its default is the option's.
    """

    def make(run: Callable[[Flags], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            run(flags(**given))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__module__ = run.__module__
        command.__annotations__ = get_type_hints(flags, include_extras=True)
        command.__signature__ = inspect.signature(flags)  # type: ignore[attr-defined]
        return command

    return make


def write_lines(
    lines: Sequence[Line], table: Callable[[Sequence[Line]], Table], *, as_json: bool
) -> None:
    """Print `table` of the lines on a terminal; otherwise, or if `as_json`, print JSON lines."""
    if as_json or not sys.stdout.isatty():
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        Console().print(table(lines))


def make_table(
    names: Sequence[str],
    rows: Iterable[Iterable[Any]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    caption: str | None = None,
) -> Table:
    """Return a table of values as plain text.

    Columns in `right` are right-aligned; columns in `whole` are never wrapped.
    """
    table = Table(box=None, pad_edge=False, caption=caption)
    for name in names:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if name in whole else "fold"
        table.add_column(name, justify=justify, no_wrap=name in whole, overflow=overflow)
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def cell(value: Any) -> Text:
    """Return a value as plain text: clients choose many names, so rich must not read markup."""
    if value is None or value is msgspec.UNSET:
        return Text()
    if isinstance(value, tuple):
        return Text(", ".join(value))
    return Text(f"{value:.4f}" if isinstance(value, float) else str(value))
