"""The database that a command works on: the configured one, or the embedded one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine

from store.embedded import EmbeddedPostgres
from store.engine import make_engine
from store.migrate import upgrade
from store.settings import StoreSettings


@asynccontextmanager
async def open_database(settings: StoreSettings) -> AsyncIterator[str]:
    """The URL of `DATABASE_URL`'s server, or of the embedded one.

    An embedded server that was not running is started, and stopped when left.
    """
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    postgres = EmbeddedPostgres(settings.data_dir)
    was_running = postgres.is_running
    url = await asyncio.to_thread(postgres.ensure_running)
    try:
        yield url
    finally:
        if not was_running:
            await asyncio.to_thread(postgres.stop)


@asynccontextmanager
async def open_engine(settings: StoreSettings) -> AsyncIterator[AsyncEngine]:
    """An engine on the migrated database, closed when left."""
    async with open_database(settings) as url:
        await upgrade(url)
        engine = make_engine(url)
        try:
            yield engine
        finally:
            await engine.dispose()
