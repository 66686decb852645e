"""Share what several commands need: options that select episodes, and the end with status 2."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from pawl.settings import StackSettings, read_settings
from store.tenants import PATTERN

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

Result = TypeVar("Result")

Since = Annotated[
    datetime | None,
    typer.Option(help="Only episodes with a call at or after this time."),
]
OfAgent = Annotated[str | None, typer.Option(help="Only episodes with calls of this agent.")]
OfPolicy = Annotated[str | None, typer.Option(help="Only episodes with calls of this policy.")]


def fail(message: str) -> NoReturn:
    """End with status 2, after one line on standard error."""
    print(f"pawl: {message}", file=sys.stderr)
    raise SystemExit(2)


def a_tenant(name: str | None) -> str | None:
    """Return what `--tenant` names, or end with status 2 if it cannot be a tenant's name."""
    if name is not None and not re.fullmatch(PATTERN, name):
        fail(
            f"--tenant: {name!r:.80} cannot be a tenant's name: write 1 to 64 letters, digits, "
            "'.', '_' and '-', the first of them a letter or a digit"
        )
    return name


# Whoever can read the database sees the data of all tenants: this narrows it.
OfTenant = Annotated[
    str | None,
    typer.Option(
        "--tenant", callback=a_tenant, help="Only this tenant's data; default: every tenant's."
    ),
]


def in_database(work: "Callable[[AsyncConnection], Awaitable[Result]]") -> Result:
    """Run `work` in a transaction of its own, and return its result."""

    async def run(engine: "AsyncEngine") -> Result:
        async with engine.begin() as one:
            return await work(one)

    return with_engine(run)


def with_engine(work: "Callable[[AsyncEngine], Awaitable[Result]]") -> Result:
    """Run `work`, which makes its own transactions, and return its result."""

    async def run() -> Result:
        from pawl.stack.database import open_engine

        async with open_engine(read_settings(StackSettings)) as engine:
            return await work(engine)

    return asyncio.run(run())


def require_torch() -> None:
    """Import torch, or end with one line that says what to do if it cannot be imported.

    Other errors of an import are faults of the code, and keep their traceback.
    """
    from pawl.stack.torch_build import unusable

    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        fail(unusable(f"{type(error).__name__}: {error}"))


def with_zone(moment: datetime | None) -> datetime | None:
    """Return the time with a zone; a time without one is read in the machine's zone."""
    return moment.astimezone() if moment is not None and moment.tzinfo is None else moment
