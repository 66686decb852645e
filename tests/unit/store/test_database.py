"""A database's URL is read as SQLAlchemy reads it and told without its login; which errors pass."""

import subprocess
import sys

import asyncpg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from proxy.upstreams.server import Replica
from store.database import is_no_records_fault, is_unavailable
from store.errors import StoreError
from store.settings import BACKENDS, check_url, without_login
from trainer.publishing.model_server import ModelServer

PARTS = st.sampled_from(
    [
        *("postgresql", "postgres", "mysql", "asyncpg", "h", "[::1]", "5432", "x", "5_4", "٣"),
        *("d=/r", "+", "://", ":", "/", "@", "?", " ", "%", "=", "&"),
    ]
)


def is_readable(url: str) -> bool:
    """Whether SQLAlchemy reads it, as a PostgreSQL's."""
    try:
        return make_url(url).get_backend_name() in BACKENDS
    except Exception:
        return False


@given(
    st.text()
    | st.lists(PARTS).map("".join)
    | st.lists(PARTS).map(lambda p: "".join(["postgresql://", *p]))
)
@example("postgresql://u:p@h:5432/d?host=/run/pg")
@example("postgresql://u:p:w@h:x@h:1/d")
@example("postgresql+asyncpg://[::1]:5432/d")
@example("postgresql++://")
def test_what_sqlalchemy_reads_is_accepted_and_nothing_else(url: str) -> None:
    try:
        check_url(url)
    except StoreError:
        assert not is_readable(url)
    else:
        assert is_readable(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/var/lib/pg", "must be a postgresql:// URL"),
        ("mysql+pymysql://h/d", "not mysql://"),
        ("postgresql://h:secret/d", "a number as its port"),
    ],
)
def test_what_is_wrong_is_named_without_the_url(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as raised:
        check_url(url)
    assert "secret" not in str(raised.value)


def test_the_command_line_starts_without_a_database_driver() -> None:
    modules = "pawl.cli, pawl.serving.supervisor"
    program = f"import sys, {modules}; print({{'sqlalchemy', 'asyncpg'}} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("https://name:secret@h/v1", "https://h/v1"),
        ("http://name:p%40ss@[::1]:8000/v1", "http://[::1]:8000/v1"),
    ],
)
def test_a_url_is_told_without_its_login(url: str, told: str) -> None:
    assert without_login(url) == told


def test_a_model_server_is_called_by_its_address_alone() -> None:
    assert ModelServer("http://name:secret@127.0.0.1:1/v1/").url == "http://127.0.0.1:1/v1"
    assert Replica("http://name:secret@127.0.0.1:1/v1", None).root == "http://127.0.0.1:1"


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
