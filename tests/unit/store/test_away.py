"""What is waited for, and what is a record's own fault."""

import asyncpg
import pytest

from store.database import is_no_records_fault, is_unavailable


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        asyncpg.AdminShutdownError("shutting down"),
        asyncpg.DiskFullError("no space"),
        asyncpg.DeadlockDetectedError("deadlock"),
        asyncpg.UndefinedTableError("not migrated"),
        asyncpg.TooManyConnectionsError("full"),
        asyncpg.InternalClientError(
            "cannot switch to state 11; another operation (2) is in progress"
        ),
    ],
)
def test_no_records_fault_is_waited_for(error: Exception) -> None:
    assert is_unavailable(error)


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.CheckViolationError("status"),
        asyncpg.CharacterNotInRepertoireError("0x00"),
        asyncpg.exceptions._base.DataError("cannot be sent"),
        asyncpg.InternalClientError("got result for unknown protocol state 3"),
        ValueError("not 16 bytes"),
    ],
)
def test_a_records_own_fault_is_told(error: Exception) -> None:
    assert not is_unavailable(error)


def test_a_wrong_password_does_not_pass_by_itself_and_is_no_records_fault() -> None:
    error = asyncpg.InvalidPasswordError("wrong")
    assert is_no_records_fault(error)
    assert not is_unavailable(error)
    assert not is_no_records_fault(asyncpg.CheckViolationError("status"))
