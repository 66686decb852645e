"""Whatever is wrong with DATABASE_URL or its server, each command says so in one line, status 2."""

import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from pawl import cli

SECRET = "s3cret-pw"
# A command, and whether it ends where the database is away: processes wait for it.
COMMANDS: dict[str, list[str]] = {
    "judge": ["--once", "--", "true"],
    "export": ["--out", "out.jsonl"],
    "credit": ["--update", "1"],
    "spool": ["--replay"],
    "migrate": [],
    "episodes delete": ["e"],
    "policies list": [],
    "policies show": ["p"],
    "policies check": [],
    "policies export": ["p", "folder"],
    "policies promote": ["p"],
    "policies rollback": ["p"],
    "policies retrain": ["p", "--from", "0"],
    "policies freeze": ["p", "--reason", "r"],
    "keys create": ["k"],
    "keys list": [],
    "keys revoke": ["k"],
}
PROCESSES: dict[str, list[str]] = {
    "proxy": [],
    "trainer": ["--once"],
    "controller": [],
    "console": [],
    "up": [],
}
# They ask no database, look at their arguments before, or report it as a finding.
OTHERS = {
    "adapters",
    "doctor",
    "demo",
    "example",
    "plan",
    "train",
    "rollout",
    "run",
    "evaluate",
    "policies import",
}
REFUSED = {
    "mysql://u:{0}@h/x",
    "hello",
    "{0}",
    "postgresql://u:{0}@h..h/x",
    "postgresql://u:{0}@./x",
    "postgresql://u:{0}@.a/x",
    "postgresql://u:{0}@" + "a" * 64 + ".example/x",
    "postgresql://u:{0}@h:0/x",
    "postgresql://u:{0}@h:99999/x",
    "postgresql://u:{0}@h:abc/x",
    "postgresql://u:{0}%zz@h%zz/x",
    "postgresql://u:{0}@a b/x",
    "postgresql://u:{0}@höst/x",
    "postgresql://u:{0}@[::1/x",
    "postgresql://u:{0}@[fe80::zz]/x",
    "postgresql://u:{0}@h/x?nothing",
    "postgresql://u:{0}@h/x?sslmode=perhaps",
}
CLOSED = "postgresql://u:{0}@127.0.0.1:9/x"
AWAY = {
    CLOSED,
    "postgresql://u:{0}@127.0.0.1:{1}/x?connect_timeout=1",
    "postgresql://u:{0}@127.0.0.1:9",
    "postgresql://u:{0}@/x?host=/nowhere",
    "postgresql://u:{0}@/x?host=/" + "n" * 300,
    "postgresql://u:{0}@[:::::]/x",
    "postgresql://u:{0}@127.0.0.1:9/%00",
    "",
}


@pytest.fixture
def hanging() -> Iterator[int]:
    """The port of a server that accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield server.getsockname()[1]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAWL_DATA_DIR", str(tmp_path / "none"))
    # It wants the process's own standard error.
    monkeypatch.setattr(cli, "configure_logging", lambda: None)
    monkeypatch.setattr(cli, "wait_passively", lambda: None)


def said(
    command: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> str:
    """What is wrong with how the command ends."""
    monkeypatch.setattr("sys.argv", ["pawl", *command.split(), *arguments])
    capfd.readouterr()
    try:
        cli.main()
    except SystemExit as end:
        errors = capfd.readouterr().err
        is_line = errors.startswith("pawl: ") and errors.count("\n") == 1 and len(errors) < 700
        if end.code == 2 and is_line and SECRET not in errors and "DATA" in errors:
            return ""
        return f"{command}: status {end.code}: {errors[-500:]!r}"
    except Exception as error:
        return f"{command}: {type(error).__name__}: {str(error)[:200]}"
    return f"{command} ends well"


def test_every_pawl_command_is_covered_by_the_tests_of_unusable_databases() -> None:
    known = set()
    for name, target in cli.COMMANDS.items():
        group = cli.Commands().get_command(None, name)
        known |= {f"{name} {one}" for one in group.commands} if target.endswith(":app") else {name}
    assert known == {*COMMANDS, *PROCESSES} | OTHERS


@pytest.fixture
def wrongs(
    hanging: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """What is wrong with how commands end that have such a URL."""

    def run(url: str, commands: Iterable[str]) -> list[str]:
        monkeypatch.setenv("DATABASE_URL", url.format(SECRET, hanging))
        # Without a URL it makes the embedded one.
        every = [name for name in commands if url or name != "migrate"]
        ends = [said(name, (COMMANDS | PROCESSES)[name], monkeypatch, capfd) for name in every]
        return [one for one in ends if one]

    return run


# The settings read the URL, in the same way for all commands.
@pytest.mark.timeout(30)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("url", sorted(REFUSED))
def test_unusable_database_url_is_refused_in_a_single_line(
    url: str, wrongs: Callable[..., list[str]]
) -> None:
    assert wrongs(url, ["keys list", *PROCESSES]) == []


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("alone")
def test_every_command_refuses_an_unusable_database_url_in_a_single_line(
    wrongs: Callable[..., list[str]],
) -> None:
    assert wrongs("postgresql://u:{0}@h..h/x", COMMANDS | PROCESSES) == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("url", sorted(AWAY))
def test_absent_database_is_reported_in_a_single_line(
    url: str, wrongs: Callable[..., list[str]]
) -> None:
    assert wrongs(url, ["keys list", "judge", "export", "migrate"]) == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("url", [CLOSED, ""], ids=["a server", "the embedded one"])
def test_every_command_reports_an_absent_database_in_a_single_line(
    url: str, wrongs: Callable[..., list[str]]
) -> None:
    assert wrongs(url, COMMANDS) == []
