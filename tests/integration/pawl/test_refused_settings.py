"""What a user gives a command that cannot be used: one line names it and the remedy, status 2."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def ended(folder: Path, *command: str, **settings: str) -> str:
    """Return what a command writes to standard error before it ends with status 2."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PAWL_")},
        "DATABASE_URL": AWAY,
        "PAWL_SPOOL_DIR": str(folder / "spool"),
        "PAWL_WORKERS": "1",
        **{
            f"PAWL_{name}LISTEN": f"127.0.0.1:{free_port()}"
            for name in ("", "ADMIN_", "TRAINER_", "CONTROLLER_", "CONSOLE_")
        },
        **settings,
    }
    done = subprocess.run(
        [sys.executable, "-m", "pawl.cli", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "s3cret-pw" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("setting", ["PAWL_LISTEN", "PAWL_ADMIN_LISTEN"])
@pytest.mark.parametrize("host", ["nowhere.invalid", "h..h", "192.0.2.1", ""])
def test_proxy_names_the_address_that_it_cannot_listen_on(
    setting: str, host: str, taken: str, tmp_path: Path
) -> None:
    address = f"{host}:{free_port()}" if host else taken
    last = ended(tmp_path, "proxy", **{setting: address}).splitlines()[-1]
    assert last.startswith("pawl: ")
    assert f"{setting}={address} cannot be listened on: " in last
    assert "stop the program that listens there, or set another HOST:PORT" in last


@pytest.mark.parametrize("command", ["controller", "console"])
def test_other_processes_name_the_address_that_they_cannot_listen_on(
    command: str, tmp_path: Path
) -> None:
    setting = f"PAWL_{command.upper()}_LISTEN"
    said = ended(tmp_path, command, **{setting: "h..h:1"}).splitlines()[-1]
    assert said.startswith(f"pawl: {setting}=h..h:1 cannot be listened on: no such host is known")


@pytest.mark.parametrize("command", ["proxy", "trainer", "controller", "adapters", "console"])
def test_unknown_log_level_is_refused(command: str, tmp_path: Path) -> None:
    assert ended(tmp_path, command, PAWL_LOG_LEVEL="loud").splitlines() == [
        "pawl: PAWL_LOG_LEVEL is 'loud': Input should be 'debug', 'info', 'warning' or 'error'; it "
        "sets: least level of the lines that are logged; `debug` has a line for each call and "
        "feedback"
    ]


def test_spool_folder_that_cannot_be_made_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spool = tmp_path / "file" / "spool"
    said = ended(tmp_path, "proxy", PAWL_SPOOL_DIR=str(spool))
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
    command: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    assert ended(tmp_path, *command).endswith(said)


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
    process: str, setting: str, value: str, tmp_path: Path
) -> None:
    """The database is away, and is not asked."""
    error = ended(tmp_path, "migrate", "--check", process, **{setting: value})
    named = "recipe config/none.toml" if setting == "PAWL_RECIPE" else setting
    assert error.startswith(f"pawl: {named}")
    assert value in error


def test_api_key_with_an_excessive_limit_of_concurrent_requests_is_refused(tmp_path: Path) -> None:
    assert "'--at-once'" in ended(tmp_path, "keys", "create", "k", "--at-once", "99999999999")
