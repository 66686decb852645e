"""What a user gives a command that cannot be used: one line names it and the remedy, status 2."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from store.admin_port import serve_app
from store.errors import NotListening
from tests.support.command_line import checked_refusal, refusal_here

AWAY = "postgresql://u:s3cret-pw@127.0.0.1:9/x"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def settings_in(folder: Path, given: dict[str, str]) -> dict[str, str]:
    """Return a command's settings: some of its own, free ports, and a database that is away."""
    listens = ("", "ADMIN_", "TRAINER_", "CONTROLLER_", "CONSOLE_")
    return {
        "DATABASE_URL": AWAY,
        "PAWL_SPOOL_DIR": str(folder / "spool"),
        "PAWL_WORKERS": "1",
        **{f"PAWL_{name}LISTEN": f"127.0.0.1:{free_port()}" for name in listens},
        **given,
    }


def ended_process(folder: Path, *command: str, **given: str) -> str:
    """Return what a process writes to standard error before it ends with status 2."""
    done = subprocess.run(
        [sys.executable, "-m", "pawl.cli", *command],
        env=os.environ | settings_in(folder, given),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return without_secret(checked_refusal(done.returncode, done.stderr))


def without_secret(errors: str) -> str:
    assert "s3cret-pw" not in errors
    return errors


@pytest.fixture
def ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command in this process; return the same of it."""

    def run(*command: str, **given: str) -> str:
        for name, value in settings_in(tmp_path, given).items():
            monkeypatch.setenv(name, value)
        return without_secret(refusal_here(monkeypatch, capfd, *command))

    return run


UNKNOWN_LEVEL = [
    "pawl: PAWL_LOG_LEVEL is 'loud': Input should be 'debug', 'info', 'warning' or 'error'; it "
    "sets: least level of the lines that are logged; `debug` has a line for each call and "
    "feedback"
]
# Unknown, unreadable, another machine's, and this one's with a port that is taken.
HOSTS = ["nowhere.invalid", "h..h", "192.0.2.1", ""]


@pytest.mark.parametrize("host", HOSTS)
def test_proxy_names_the_address_that_it_cannot_listen_on(
    host: str, taken: str, ended: Callable[..., str]
) -> None:
    address = f"{host}:{free_port()}" if host else taken
    last = ended("proxy", PAWL_LISTEN=address).splitlines()[-1]
    assert last.startswith("pawl: ")
    assert_named(last, "PAWL_LISTEN", address)


@pytest.mark.parametrize("host", HOSTS)
def test_admin_port_names_the_address_that_it_cannot_listen_on(host: str, taken: str) -> None:
    """On the event loop of the proxy's child that serves it."""
    setting = "PAWL_ADMIN_LISTEN"
    address = f"{host}:{free_port()}" if host else taken
    with pytest.raises(NotListening) as said:
        uvloop.run(serve_app(web.Application(), address, setting, None))
    assert_named(str(said.value), setting, address)


def test_admin_address_of_the_proxys_child_is_named_by_the_proxy(
    taken: str, tmp_path: Path
) -> None:
    setting = "PAWL_ADMIN_LISTEN"
    last = ended_process(tmp_path, "proxy", **{setting: taken}).splitlines()[-1]
    assert last.startswith("pawl: ")
    assert_named(last, setting, taken)


def assert_named(said: str, setting: str, address: str) -> None:
    assert f"{setting}={address} cannot be listened on: " in said
    assert "stop the program that listens there, or set another HOST:PORT" in said


@pytest.mark.parametrize("command", ["controller", "console"])
def test_other_processes_name_the_address_that_they_cannot_listen_on(
    command: str, ended: Callable[..., str]
) -> None:
    setting = f"PAWL_{command.upper()}_LISTEN"
    said = ended(command, **{setting: "h..h:1"}).splitlines()[-1]
    assert said.startswith(f"pawl: {setting}=h..h:1 cannot be listened on: no such host is known")


@pytest.mark.parametrize("command", ["trainer", "controller", "adapters", "console"])
def test_unknown_log_level_is_refused(command: str, ended: Callable[..., str]) -> None:
    assert ended(command, PAWL_LOG_LEVEL="loud").splitlines() == UNKNOWN_LEVEL


def test_process_whose_log_level_is_unknown_ends_with_that_line(tmp_path: Path) -> None:
    said = ended_process(tmp_path, "proxy", PAWL_LOG_LEVEL="loud")
    assert said.splitlines() == UNKNOWN_LEVEL


def test_spool_folder_that_cannot_be_made_is_named_in_the_error(
    ended: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    spool = tmp_path / "file" / "spool"
    said = ended("proxy", PAWL_SPOOL_DIR=str(spool))
    assert (
        said
        == f"pawl: PAWL_SPOOL_DIR={spool} cannot be made: Not a directory: set another folder\n"
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ("export", "--out", "/nowhere/at/all.jsonl"),
            "pawl: --out: there is no folder /nowhere/at; make it, or name another\n",
        ),
        (
            ("credit", "--update", "99999999999999999999"),
            "pawl: --update is a version's number or an update's id, not '99999999999999999999'\n",
        ),
        (
            ("plan", "/nowhere"),
            "pawl: the model '/nowhere' cannot be planned: there is no such folder; name one of the"
            " hub, or a folder with the config.json of a causal language model\n",
        ),
    ],
)
def test_unusable_command_argument_is_refused_with_its_reason(
    command: tuple[str, ...], said: str, ended: Callable[..., str]
) -> None:
    assert ended(*command).endswith(said)


@pytest.mark.parametrize(
    ("process", "setting", "value"),
    [
        ("proxy", "PAWL_KEEP_DAYS", "abc"),
        ("proxy", "PAWL_REDACTION", "config/none.toml"),
        ("trainer", "PAWL_SEED", "-1"),
        ("trainer", "PAWL_POLICIES", "config/none.toml"),
        ("trainer", "PAWL_RECIPE", "config/none.toml"),
        ("controller", "PAWL_CONTROLLER_POLL_S", "0"),
        ("console", "PAWL_CONSOLE_PREFIX", "no path"),
    ],
)
def test_migrate_check_refuses_a_processs_unusable_setting(
    process: str, setting: str, value: str, ended: Callable[..., str]
) -> None:
    """The database is away, and is not asked."""
    error = ended("migrate", "--check", process, **{setting: value})
    named = "recipe config/none.toml" if setting == "PAWL_RECIPE" else setting
    assert error.startswith(f"pawl: {named}")
    assert value in error


def test_api_key_with_an_excessive_limit_of_concurrent_requests_is_refused(
    ended: Callable[..., str],
) -> None:
    assert "'--at-once'" in ended("keys", "create", "k", "--at-once", "99999999999")
