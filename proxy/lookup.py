"""Questions to PostgreSQL from the serving path: few, and never waited for long."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.settings import ProxySettings
from store.away import is_away
from store.engine import make_engine

log = structlog.get_logger()

# After a question that was not answered none is asked for so long.
PAUSE_S: Final = 1.0
URL_FILE: Final = "database.url"
Answer = TypeVar("Answer")


class Lookup:
    """Asks the database, if there is one just now."""

    def __init__(self, settings: ProxySettings) -> None:
        self._given = settings.database_url
        self._told = url_file(settings.spool_dir)
        self._engine: AsyncEngine | None = None
        self._not_before = 0.0

    async def ask(
        self, question: Callable[[AsyncConnection], Awaitable[Answer]], *, within_s: float
    ) -> Answer | None:
        """The database's answer; None where it gives none in time."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            return None
        try:
            engine = self._connect()
            if engine is None:
                return None
            async with asyncio.timeout(within_s), engine.connect() as connection:
                return await question(connection)
        except Exception as error:
            # Whatever it is: no call and no feedback fails for what the database says.
            self._not_before = loop.time() + PAUSE_S
            tell = log.warning if is_away(error) else log.exception
            tell("lookup_failed", reason=type(error).__name__)
            return None

    def _connect(self) -> AsyncEngine | None:
        if self._engine is None:
            url = self._url()
            if url is not None:
                self._engine = make_engine(url, pool_size=2)
        return self._engine

    def _url(self) -> str | None:
        if self._given is not None:
            return self._given.get_secret_value()
        # The embedded server's: a socket of this machine, told by the keeper that started it.
        return self._told.read_text() if self._told.exists() else None

    async def close(self) -> None:
        """Give the connections back."""
        if self._engine is not None:
            await self._engine.dispose()


def url_file(spool_dir: Path) -> Path:
    """Where the keeper tells the workers of an embedded PostgreSQL."""
    return spool_dir / URL_FILE
