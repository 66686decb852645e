"""Make one engine per process, with time limits so that nothing waits for the database forever."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from store.connection.availability import is_no_records_fault
from store.connection.urls import check_url

CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 60.0


def async_url(database_url: str) -> str:
    """Return `postgresql://…` in the form that SQLAlchemy's asyncpg dialect takes.

    Raises:
        StoreError: see `check_url`.
    """
    check_url(database_url)
    url = make_url(database_url).set(drivername="postgresql+asyncpg")
    return url.render_as_string(hide_password=False)


def to_json(value: object) -> str:
    """Return `value` as JSON text. `msgspec.Raw` parts are copied unchanged."""
    return msgspec.json.encode(value).decode()


def make_engine(database_url: str, *, pool_size: int = 5) -> AsyncEngine:
    """Make an engine for `database_url`; it connects on first use.

    Raises:
        StoreError: see `check_url`.
    """
    return create_async_engine(
        async_url(database_url),
        pool_size=pool_size,
        pool_pre_ping=True,
        json_serializer=to_json,
        connect_args={
            "timeout": CONNECT_TIMEOUT_S,
            "command_timeout": STATEMENT_TIMEOUT_S,
            "server_settings": {"application_name": "pawl"},
        },
    )


async def driver_of(connection: AsyncConnection) -> Any:
    """Return the driver's own connection, in the transaction of `connection`."""
    # SQLAlchemy begins the transaction with its first statement; the driver's come later.
    await connection.execute(text("SELECT 1"))
    return (await connection.get_raw_connection()).driver_connection


async def database_time(engine: AsyncEngine) -> datetime:
    """Return the time (UTC) by the clock of the database."""
    async with engine.connect() as connection:
        now: datetime = (await connection.execute(text("SELECT now()"))).scalar_one()
    return now.astimezone(UTC)


async def answers(engine: AsyncEngine, within_s: float = 5.0) -> bool:
    """Return whether the database answers `SELECT 1` within `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s), engine.connect() as connection:
            await connection.execute(text("SELECT 1"))
    except Exception as error:
        if not is_no_records_fault(error):
            raise
        return False
    return True
