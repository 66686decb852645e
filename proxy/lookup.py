"""Query PostgreSQL while a request waits: seldom, and each time within a short limit."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from proxy.settings import ProxySettings
from store.driver import Connect, Driver, connector, is_temporary_failure
from store.embedded import EmbeddedPostgres

log = structlog.get_logger()

# After a failed query no other is tried for this long.
PAUSE_S: Final = 1.0
MOST_AT_ONCE: Final = 2
Answer = TypeVar("Answer")


class Lookup:
    """Query the database for requests that must neither fail nor wait long because of it."""

    def __init__(self, settings: ProxySettings) -> None:
        """Use the database in the settings or, without one, the server that the ingester starts."""
        url = settings.database_url
        self._embedded = EmbeddedPostgres(settings.data_dir) if url is None else None
        self._url = url.get_secret_value() if url is not None else ""
        self._connect: Connect | None = None
        # Connections that are open, and not in use.
        self._idle: list[Driver] = []
        self._not_before = 0.0
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def ask(
        self, question: Callable[[Driver], Awaitable[Answer]], *, within_s: float
    ) -> Answer | None:
        """Return the answer to `question`, or None if it fails or takes longer than `within_s`.

        At most `MOST_AT_ONCE` questions are asked at once. The result is None, too, for a question
        that waits for its turn longer than `within_s`, and for `PAUSE_S` after one that failed.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._turns.acquire()
        except TimeoutError:
            return None
        try:
            return await self._ask_in_turn(question, within_s)
        finally:
            self._turns.release()

    async def _ask_in_turn(
        self, question: Callable[[Driver], Awaitable[Answer]], within_s: float
    ) -> Answer | None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            return None
        try:
            if self._connect is None:
                if self._embedded is not None:
                    self._embedded.check_owner()
                self._connect = connector(self._embedded.url if self._embedded else self._url)
            async with asyncio.timeout(within_s):
                return await self._on_connection(self._connect, question)
        except Exception as error:
            # No call and no feedback may fail because of the database, whatever the error is.
            self._not_before = loop.time() + PAUSE_S
            if self._embedded is not None and isinstance(error, FileNotFoundError):
                # The server has no socket: it has not been started yet, or was stopped.
                return None
            write_log = log.warning if is_temporary_failure(error) else log.exception
            write_log("lookup_failed", reason=type(error).__name__)
            return None

    async def _on_connection(
        self, connect: Connect, question: Callable[[Driver], Awaitable[Answer]]
    ) -> Answer:
        driver = self._idle.pop() if self._idle else None
        if driver is None or driver.is_closed():
            driver = await connect()
        try:
            answer = await question(driver)
        except BaseException:
            # The connection's state is unknown.
            driver.terminate()
            raise
        self._idle.append(driver)
        return answer

    def close(self) -> None:
        """Close the idle connections to the database."""
        for driver in self._idle:
            driver.terminate()
