"""A database's URL is read as libpq reads it and told without its login; which errors pass."""

import inspect
import subprocess
import sys
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
from asyncpg import connect_utils
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.upstreams.server import Replica
from store.database import is_unavailable, prevents_all_storing
from store.errors import StoreError
from store.settings import read_url, without_login
from trainer.publishing.model_server import ModelServer

DRIVER_ARGUMENTS = inspect.signature(
    connect_utils._parse_connect_dsn_and_args
).parameters.keys() - {"dsn"}
PARTS = st.sampled_from(
    [
        *("postgresql", "postgres", "mysql", "asyncpg", "h", "[::1]", "5432", "x", "5_4", "٣"),
        *("d=/r", "+", "://", ":", "/", "@", "?", " ", "%", "=", "&", ",", "sslmode=", "require"),
    ]
)


def driver_reads(url: str) -> list[Any]:
    """Return the address of each host, and the parameters, as the driver reads them."""
    read = []
    for dsn in read_url(url)[0]:
        found, parameters = connect_utils._parse_connect_dsn_and_args(
            dsn=dsn, **dict.fromkeys(DRIVER_ARGUMENTS)
        )
        read.append((found[0], parameters))
    return read


@given(
    st.text()
    | st.lists(PARTS).map("".join)
    | st.lists(PARTS).map(lambda p: "".join(["postgresql://h", *p]))
)
@example("postgresql://u:p@h:5432/d?host=/run/pg")
@example("postgresql+asyncpg://[::1]:5432/d")
@example("postgresql++://")
def test_accepted_url_is_read_by_the_driver(url: str) -> None:
    with suppress(StoreError):
        assert driver_reads(url)


@pytest.mark.parametrize(
    ("url", "hosts", "login", "database"),
    [
        ("postgresql://u:p@h:5432/d", [("h", 5432)], ("u", "p"), "d"),
        ("postgres://u:a/b%40c@[::1]:1/d", [("::1", 1)], ("u", "a/b@c"), "d"),
        ("postgresql+asyncpg://h/d?user=u@x&password=p", [("h", 5432)], ("u@x", "p"), "d"),
        ("postgresql://u:p@h,h2:1/d", [("h", 5432), ("h2", 1)], ("u", "p"), "d"),
        ("postgresql://u:p@/d?host=h,h2&port=1,2", [("h", 1), ("h2", 2)], ("u", "p"), "d"),
        ("postgresql://u:p@/d?host=/run/pg", ["/run/pg/.s.PGSQL.5432"], ("u", "p"), "d"),
    ],
)
def test_hosts_login_and_database_of_a_url_are_read_as_libpq_does(
    url: str, hosts: list[Any], login: tuple[str, str], database: str
) -> None:
    read = driver_reads(url)
    assert [found for found, _ in read] == hosts
    assert {(p.user, p.password, p.database) for _, p in read} == {(*login, database)}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/var/lib/pg", "must be a postgresql:// URL"),
        ("mysql+pymysql://h/d", "not mysql://"),
        ("postgresql://h:secret/d", "a number from 1 to 65535 as its port"),
        ("postgresql://u:secret@h/d?channel_binding=require", "the parameter channel_binding"),
        ("postgresql://u:secret@h/d?ssl=require", "the parameter ssl,"),
        ("postgresql://u:secret@h/d?sslmode=on", "as sslmode one of: disable, allow"),
        ("postgresql://u:secret@h/d?sslmode=verify-full", "have sslrootcert=FILE"),
        ("postgresql://u:secret@h/d?sslrootcert=/no.pem", "as sslrootcert that cannot be read"),
        ("postgresql://u:secret@h/d?target_session_attrs=standby", "one of: any, primary"),
        ("postgresql://u:secret@h,h2/d?port=1,2,3", "one port, or as many as hosts"),
        ("postgresql://u:secret@h/d?connect_timeout=soon", "seconds as connect_timeout"),
        ("postgresql://u:secret@h/d?sslmode", "NAME=VALUE"),
    ],
)
def test_error_in_a_url_is_named_without_the_login(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as raised:
        read_url(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("pawl.cli, pawl.serving.supervisor", {"sqlalchemy", "asyncpg"}),
        # It would be a third of a worker's memory.
        ("pawl.serving.child, proxy.worker", {"sqlalchemy"}),
    ],
)
def test_process_does_not_import_unused_database_libraries(modules: str, without: set[str]) -> None:
    program = f"import sys, {modules}; print({without} & {{*sys.modules}})"
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
def test_url_is_shown_without_its_login(url: str, told: str) -> None:
    assert without_login(url) == told


def test_name_of_a_model_server_is_its_address_without_the_login() -> None:
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
def test_temporary_database_error_counts_as_unavailable(error: Exception) -> None:
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
def test_error_caused_by_a_record_does_not_count_as_unavailable(error: Exception) -> None:
    assert not is_unavailable(error)


def test_wrong_password_is_neither_temporary_nor_caused_by_a_record() -> None:
    error = asyncpg.InvalidPasswordError("wrong")
    assert prevents_all_storing(error)
    assert not is_unavailable(error)
    assert not prevents_all_storing(asyncpg.CheckViolationError("status"))
