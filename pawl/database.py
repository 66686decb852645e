"""Open the database that a command works on: the configured server, or the embedded one."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.database import make_engine
from store.embedded import EmbeddedPostgres
from store.schema.migrate import upgrade
from store.settings import StoreSettings

log = structlog.get_logger()

# Pause between checks that the embedded server runs.
WATCH_S: Final = 0.5
# How long to wait for a restart of the embedded server before trying again.
RESTART_S: Final = 5.0


@asynccontextmanager
async def open_database(settings: StoreSettings, *, create: bool) -> AsyncIterator[str]:
    """Yield the URL of the configured database (`DATABASE_URL`), or of the embedded server.

    The embedded server is started if it does not run, and then stopped at the end. With `create`,
    its files are created if they are missing.

    Raises:
        StoreError: the embedded server's files are missing without `create`, or it does not start.
    """
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    postgres = EmbeddedPostgres(settings.data_dir)
    if not create:
        postgres.check_initialised()
    try:
        yield await asyncio.to_thread(postgres.ensure_running)
    finally:
        # If the caller was cancelled during the start, this ends the start.
        await asyncio.to_thread(postgres.stop)


@asynccontextmanager
async def open_engine(settings: StoreSettings, *, create: bool) -> AsyncIterator[AsyncEngine]:
    """Open the database as `open_database` does, upgrade its schema, and yield an engine."""
    async with open_database(settings, create=create) as url:
        await upgrade(url)
        engine = make_engine(url)
        try:
            yield engine
        finally:
            await engine.dispose()


@asynccontextmanager
async def keep_postgres_running(data_dir: Path) -> AsyncIterator[EmbeddedPostgres]:
    """Run the embedded server, restart it whenever it is down, and stop it at the end.

    A server that another process started is left running.
    """
    postgres = EmbeddedPostgres(data_dir)
    ending = threading.Event()

    def restart_if_down() -> None:
        while not ending.wait(WATCH_S):
            try:
                postgres.ensure_running(within_s=RESTART_S)
            except Exception as error:
                if not ending.is_set():
                    reason = f"{type(error).__name__}: {error}"
                    log.warning("postgres_restart_failed", reason=reason[:200])

    try:
        await asyncio.to_thread(postgres.ensure_running)
        keeping = asyncio.create_task(asyncio.to_thread(restart_if_down), name="keep-postgres")
        try:
            yield postgres
        finally:
            ending.set()
            await asyncio.to_thread(postgres.stop)
            # The thread may have restarted the server once more, so it is stopped again below.
            await asyncio.wait([keeping])
    finally:
        await asyncio.to_thread(postgres.stop)
