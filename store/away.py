"""Telling a database that is away from one that refuses: the first is waited for.

Away is also one that takes no record at all now, whatever is in it.
"""

from typing import Final

import asyncpg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

# asyncpg's own errors reach us unwrapped while a connection is being made.
_AWAY: Final = (
    OSError,
    TimeoutError,
    OperationalError,
    InterfaceError,
    PoolTimeout,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.OperatorInterventionError,
    asyncpg.InvalidCatalogNameError,
    # Not the fault of any record: full disks, deadlocks, a standby, a schema that is being moved.
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.PostgresSystemError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.InvalidCachedStatementError,
)


def is_away(error: BaseException) -> bool:
    """Whether `error` says that PostgreSQL cannot be reached now (and may be later)."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    driver_error = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig else None
    if driver_error is not None and is_away(driver_error):
        return True
    # The driver's own word for a value that cannot be sent is an InterfaceError too.
    return isinstance(error, _AWAY) and not isinstance(error, ValueError)
