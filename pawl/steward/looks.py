"""Give a look at a policy its time, and tell one that is too long from a database that is away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

# A look that takes longer is given up, and begun again: episodes that were read count.
LOOK_S: Final = 60.0
# It reads on for so long, and leaves the rest to the next looks: other policies wait for it.
READ_S: Final = 5.0

T = TypeVar("T")


class LookTooLong(Exception):
    """Say that a look was given up, as it took too long; the database had let it begin."""


def reads_until() -> float:
    """Return the time of the event loop at which a look that reads now is to leave off."""
    return asyncio.get_running_loop().time() + READ_S


async def one_look(engine: AsyncEngine, judge: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Judge in one transaction, and return what came of it.

    Raises:
        LookTooLong: it is not done in time; the next goes on with the episodes that it had read.
        TimeoutError: the database did not even let it begin.
    """
    has_begun = False
    try:
        async with asyncio.timeout(LOOK_S), engine.begin() as connection:
            has_begun = True
            return await judge(connection)
    except TimeoutError as error:
        if not has_begun:
            raise
        raise LookTooLong(
            f"a look was given up after {LOOK_S:g} s, though the database had let it begin: what it"
            " had read counts, and the next goes on from there; if this stays so, the database is"
            " too slow for as many episodes"
        ) from error
