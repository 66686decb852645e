"""The database that a command works on: the configured one, or the embedded one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine

from store.embedded import EmbeddedPostgres
from store.engine import make_engine
from store.migrate import upgrade
from store.settings import StoreSettings


async def database_url(settings: StoreSettings) -> str:
    """`DATABASE_URL`, or the embedded server's, started if need be."""
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    return await asyncio.to_thread(EmbeddedPostgres(settings.data_dir).ensure_running)


@asynccontextmanager
async def open_engine(settings: StoreSettings) -> AsyncIterator[AsyncEngine]:
    """An engine on the migrated database, closed when left."""
    url = await database_url(settings)
    await upgrade(url)
    engine = make_engine(url)
    try:
        yield engine
    finally:
        await engine.dispose()
