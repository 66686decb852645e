"""Connect to PostgreSQL with the driver alone, and classify the driver's errors.

Callers wait and retry while the database is unavailable. A database that accepts no record at all
for now counts as unavailable, too.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import asyncpg

from store.settings import read_url

# The time to connect, for all hosts together.
CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 60.0

# The driver's own connection, which SQLAlchemy's connections wrap.
Driver: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Connect = Callable[[], Awaitable[Driver]]


def connector(database_url: str, limit_s: float | None = STATEMENT_TIMEOUT_S) -> Connect:
    """Return a function that connects to `database_url`, trying its hosts in order like libpq.

    A statement may take `limit_s` seconds (None: any time).

    Raises:
        StoreError: see `read_url`.
    """
    dsns, timeout_s = read_url(database_url)
    connect_s = timeout_s or CONNECT_TIMEOUT_S / len(dsns)

    async def connect() -> Driver:
        # The driver has one time limit for all hosts, which the first could use up.
        for dsn in dsns[:-1]:
            try:
                return await asyncpg.connect(dsn, timeout=connect_s, command_timeout=limit_s)
            except Exception as error:
                if not is_temporary_failure(error):
                    raise
        return await asyncpg.connect(dsns[-1], timeout=connect_s, command_timeout=limit_s)

    return connect


_UNAVAILABLE: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.OperatorInterventionError,
    asyncpg.InvalidCatalogNameError,
    # During a failover no host may be the primary.
    asyncpg.TargetServerAttributeNotMatched,
    # No record is at fault: full disk, deadlock, read-only standby, schema being migrated.
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.PostgresSystemError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.InvalidCachedStatementError,
)


def is_temporary_failure(error: BaseException) -> bool:
    """Return whether the driver's `error` means that PostgreSQL may come back by itself."""
    # asyncpg raises an InterfaceError that is also a ValueError for a value it cannot encode:
    # then the record is at fault, and waiting would not help.
    return (isinstance(error, _UNAVAILABLE) or _session_was_ended(error)) and not isinstance(
        error, ValueError
    )


def _session_was_ended(error: BaseException) -> bool:
    """Return whether `error` means that the server ended the session and asyncpg has not seen it.

    Until asyncpg has seen the connection's end, it counts the server's last message as an operation
    in progress (MagicStack/asyncpg issue 1069).
    """
    return isinstance(error, asyncpg.InternalClientError) and "another operation" in str(error)
