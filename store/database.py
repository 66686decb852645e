"""Connect to PostgreSQL with SQLAlchemy, and classify errors.

Each process has one engine, except workers, which use the driver alone. Its time limits keep
callers from waiting for the database forever.
"""

import asyncio
import socket
import ssl
from datetime import UTC, datetime
from typing import Final

import asyncpg
import msgspec
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from store.driver import STATEMENT_TIMEOUT_S, Driver, connector, is_temporary_failure
from store.errors import NewerSchema
from store.settings import read_url


def to_json(value: object) -> str:
    """Return `value` as JSON text. `msgspec.Raw` parts are copied unchanged."""
    return msgspec.json.encode(value).decode()


def make_engine(
    database_url: str,
    *,
    pool_size: int = 5,
    max_overflow: int = 10,
    limit_s: float | None = STATEMENT_TIMEOUT_S,
    wait_s: float = 30.0,
) -> AsyncEngine:
    """Make an engine for `database_url`; it connects on first use.

    It keeps `pool_size` connections, and opens up to `max_overflow` more while these are in use. A
    statement may take `limit_s` seconds (None: any time), and waiting for a connection `wait_s`.

    Raises:
        StoreError: see `read_url`.
    """
    return create_async_engine(
        # `async_creator` chooses among the hosts.
        read_url(database_url)[0][0].replace("postgresql:", "postgresql+asyncpg:", 1),
        async_creator=connector(database_url, limit_s),
        pool_size=pool_size,
        max_overflow=max_overflow,
        pool_timeout=wait_s,
        pool_pre_ping=True,
        json_serializer=to_json,
    )


async def driver_of(connection: AsyncConnection) -> Driver:
    """Return the driver's own connection, in the transaction of `connection`."""
    # SQLAlchemy begins the transaction with its first statement; the driver's come later.
    await connection.execute(text("SELECT 1"))
    return await idle_driver_of(connection)


async def idle_driver_of(connection: AsyncConnection) -> Driver:
    """Return the driver's own connection, for a caller that begins its own transactions."""
    driver: Driver | None = (await connection.get_raw_connection()).driver_connection
    assert driver is not None
    return driver


async def database_time(engine: AsyncEngine) -> datetime:
    """Return the time (UTC) by the clock of the database."""
    async with engine.connect() as connection:
        now: datetime = (await connection.execute(text("SELECT now()"))).scalar_one()
    return now.astimezone(UTC)


async def is_answering(engine: AsyncEngine, within_s: float = 5.0) -> bool:
    """Return whether the database answers `SELECT 1` within `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s), engine.connect() as connection:
            await connection.execute(text("SELECT 1"))
    except Exception as error:
        if not prevents_all_storing(error):
            raise
        return False
    return True


# While a connection is being made, SQLAlchemy does not wrap asyncpg's own errors.
_UNAVAILABLE: Final = (OperationalError, InterfaceError, PoolTimeout)
# PostgreSQL answers, so it is no outage: a person has to act. The second is a wrong password, or a
# role that may not connect.
_LASTING_REFUSALS: Final = (
    asyncpg.SyntaxOrAccessError,
    asyncpg.InvalidAuthorizationSpecificationError,
    ssl.SSLCertVerificationError,
    NewerSchema,
)
# What to do about an error; the first that fits.
_REMEDIES: Final = (
    (socket.gaierror, "correct the host in DATABASE_URL"),
    (
        ssl.SSLCertVerificationError,
        "DATABASE_URL must name the host that the certificate is for, and as sslrootcert the file "
        "of its authority",
    ),
    (asyncpg.InvalidPasswordError, "correct user and password in DATABASE_URL"),
    (
        (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.PostgresConnectionError),
        "a server that takes TLS only needs sslmode=require in DATABASE_URL; else let this user in "
        "from this machine (pg_hba.conf)",
    ),
    (asyncpg.InvalidCatalogNameError, "make the database with createdb, or correct DATABASE_URL"),
    (asyncpg.UndefinedTableError, "make the tables with `pawl migrate`, or start the proxy"),
    (
        asyncpg.InsufficientPrivilegeError,
        "grant this privilege to the user that DATABASE_URL names",
    ),
    (OSError, "start PostgreSQL, or correct DATABASE_URL"),
)


def is_unavailable(error: BaseException) -> bool:
    """Return whether `error` means that PostgreSQL is unavailable now and may come back."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, _UNAVAILABLE) or is_temporary_failure(_driver_error(error))


def is_lasting_refusal(error: BaseException) -> bool:
    """Return whether PostgreSQL refuses with `error` until a person removes the cause."""
    return isinstance(_driver_error(error), _LASTING_REFUSALS)


def prevents_all_storing(error: BaseException) -> bool:
    """Return whether `error` means that no record can be stored now, whatever it contains."""
    return is_unavailable(error) or is_lasting_refusal(error)


def is_deadlock(error: BaseException) -> bool:
    """Return whether PostgreSQL ended the transaction because of a deadlock."""
    return isinstance(_driver_error(error), asyncpg.DeadlockDetectedError)


def explain_error(error: BaseException) -> str:
    """Return the message of PostgreSQL or its driver in one line, with the remedy if known."""
    error = _driver_error(error)
    silence = "it does not answer in time" if isinstance(error, TimeoutError) else ""
    reason = " ".join(str(error).split()) or silence or type(error).__name__
    if "rejected SSL upgrade" in reason:
        return (
            f"{reason}: a server without TLS needs sslmode=disable in DATABASE_URL, or no sslmode"
        )
    remedy = next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), None)
    return reason if remedy is None else f"{reason:.200}: {remedy}"


def is_too_slow(error: BaseException) -> bool:
    """Return whether PostgreSQL, which is available, cancelled a statement that took too long."""
    return isinstance(_driver_error(error), asyncpg.QueryCanceledError)


def is_bad_value(error: BaseException) -> bool:
    """Return whether a parameter of a statement is outside the range of its type."""
    # The driver raises a ValueError, PostgreSQL a DataError.
    cause = _driver_error(error)
    return cause is not error and isinstance(cause, asyncpg.DataError | ValueError)


def is_read_only(error: BaseException) -> bool:
    """Return whether PostgreSQL answers but is read-only, as during a failover."""
    return isinstance(_driver_error(error), asyncpg.ReadOnlySQLTransactionError)


def _driver_error(error: BaseException) -> BaseException:
    """Return the driver's error that SQLAlchemy has wrapped, or `error` itself."""
    cause = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig else None
    return error if cause is None else cause
