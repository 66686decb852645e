"""Distinguish a database that is unavailable from one that refuses a record.

Callers wait and retry while it is unavailable. A database that accepts no record at all for
now, whatever the record contains, counts as unavailable too.
"""

from typing import Final

import asyncpg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

# While a connection is being made, SQLAlchemy does not wrap asyncpg's own errors.
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
    # No record is at fault: full disk, deadlock, read-only standby, schema being migrated.
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.PostgresSystemError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.InvalidCachedStatementError,
)
# PostgreSQL answers, and no outage ends in this: somebody has to do something. The latter is a
# wrong password, or a role that may not connect.
_REFUSES: Final = (asyncpg.SyntaxOrAccessError, asyncpg.InvalidAuthorizationSpecificationError)


def _was_ended(error: BaseException) -> bool:
    """Return whether the server ended the session while asyncpg was still reading why.

    Until it has seen the end of the connection, asyncpg counts the message as an operation that is
    in progress (MagicStack/asyncpg issue 1069).
    """
    return isinstance(error, asyncpg.InternalClientError) and "another operation" in str(error)


def is_unavailable(error: BaseException) -> bool:
    """Return whether `error` means that PostgreSQL is unavailable now and may come back."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    driver_error = _driver_error(error)
    if driver_error is not error and is_unavailable(driver_error):
        return True
    # asyncpg raises an InterfaceError that is also a ValueError for a value it cannot encode:
    # then the record is at fault, and waiting would not help.
    away = isinstance(error, _AWAY) or _was_ended(error)
    return away and not isinstance(error, ValueError)


def is_refusal(error: BaseException) -> bool:
    """Return whether PostgreSQL answers with `error` and will do so until somebody mends it."""
    return isinstance(_driver_error(error), _REFUSES)


def is_no_records_fault(error: BaseException) -> bool:
    """Return whether no record can be stored now, whatever it contains."""
    return is_unavailable(error) or is_refusal(error)


def is_read_only(error: BaseException) -> bool:
    """Return whether PostgreSQL answers and takes no writes, as one does during a failover."""
    return isinstance(_driver_error(error), asyncpg.ReadOnlySQLTransactionError)


def _driver_error(error: BaseException) -> BaseException:
    """Return the driver's error that SQLAlchemy has wrapped, or `error` itself."""
    cause = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig else None
    return error if cause is None else cause
