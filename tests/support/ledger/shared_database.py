"""A database that the examples of a property share: one connection, emptied now and then."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from sqlalchemy import text

from store.database import make_engine

Result = TypeVar("Result")
# A table that grows for 50,000 examples makes each of them slower than the one before.
EMPTIED_AFTER: Final = 500


class SharedDatabase:
    """Runs examples one after another, each with what the ones before it have stored."""

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self.engine = make_engine(url)
        self._runner = runner
        self._examples = 0

    def run(self, example: Coroutine[Any, Any, Result]) -> Result:
        """Run one example to its end."""
        self._examples += 1
        if self._examples % EMPTIED_AFTER == 0:
            self._runner.run(self._empty())
        return self._runner.run(example)

    async def _empty(self) -> None:
        async with self.engine.begin() as connection:
            await connection.execute(text("TRUNCATE transitions, episodes CASCADE"))

    def close(self) -> None:
        self._runner.run(self.engine.dispose())


@contextmanager
def shared_database(url: str) -> Iterator[SharedDatabase]:
    """Share a database until the block ends."""
    with asyncio.Runner() as runner:
        shared = SharedDatabase(url, runner)
        try:
            yield shared
        finally:
            shared.close()
