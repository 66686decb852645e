"""Query PostgreSQL from the serving path: seldom, and each time within a short limit."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.settings import ProxySettings
from store.database import is_unavailable, make_engine

log = structlog.get_logger()

# After a failed query no other is tried for this long.
PAUSE_S: Final = 1.0
AT_ONCE: Final = 2
URL_FILE: Final = "database.url"
Answer = TypeVar("Answer")


class Lookup:
    """Query the database from the serving path, where it can be reached."""

    def __init__(self, settings: ProxySettings) -> None:
        """Take the database's URL from the settings, or from the file of an embedded server."""
        self._configured_url = settings.database_url
        self._url_file = url_file(settings.spool_dir)
        self._engine: AsyncEngine | None = None
        self._not_before = 0.0
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def ask(
        self, question: Callable[[AsyncConnection], Awaitable[Answer]], *, within_s: float
    ) -> Answer | None:
        """Return the query's result, or None if the database does not give it within `within_s`.

        As many are asked at once as there are connections. One whose turn does not come in time
        gets None, too, and says nothing about the database: its client asks too much.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._turns.acquire()
        except TimeoutError:
            return None
        try:
            return await self._asked(question, within_s)
        finally:
            self._turns.release()

    async def _asked(
        self, question: Callable[[AsyncConnection], Awaitable[Answer]], within_s: float
    ) -> Answer | None:
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
            # No call and no feedback may fail because of the database, whatever the error is.
            self._not_before = loop.time() + PAUSE_S
            tell = log.warning if is_unavailable(error) else log.exception
            tell("lookup_failed", reason=type(error).__name__)
            return None

    def _connect(self) -> AsyncEngine | None:
        if self._engine is None:
            url = self._url()
            if url is not None:
                self._engine = make_engine(url, pool_size=AT_ONCE)
        return self._engine

    def _url(self) -> str | None:
        if self._configured_url is not None:
            return self._configured_url.get_secret_value()
        # The ingester that starts an embedded server writes the URL of its socket into this file.
        return self._url_file.read_text() if self._url_file.exists() else None

    async def close(self) -> None:
        """Close the connections to the database."""
        if self._engine is not None:
            await self._engine.dispose()


def url_file(spool_dir: Path) -> Path:
    """Return the path of the file with the URL of an embedded PostgreSQL."""
    return spool_dir / URL_FILE
