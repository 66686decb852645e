"""A database's URL is checked as SQLAlchemy would read it, and without SQLAlchemy."""

import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from store.errors import StoreError
from store.settings import BACKENDS, check_url

WORDS = (
    "postgresql",
    "postgres",
    "mysql",
    "asyncpg",
    "h",
    "[::1]",
    "5432",
    "x",
    "5_4",
    "٣",
    "d=/r",
)
PARTS = st.sampled_from((*WORDS, "+", "://", ":", "/", "@", "?", " ", "%", "=", "&"))


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
