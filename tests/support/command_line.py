"""`pawl COMMAND` in this process, as far as its command line: a process costs most of a second."""

import pytest

from pawl import cli


def run_here(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    """Run a command; one that cannot run raises SystemExit."""
    # They are the process's: the tests after this one have theirs.
    monkeypatch.setattr(cli, "configure_logging", lambda: None)
    monkeypatch.setattr(cli, "wait_passively", lambda: None)
    monkeypatch.setattr("sys.argv", ["pawl", *command])
    cli.main()


def refusal_here(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *command: str
) -> str:
    """Run a command; return what it writes to standard error before it ends with status 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        run_here(monkeypatch, *command)
    return checked_refusal(end.value.code, capfd.readouterr().err)


def checked_refusal(status: object, errors: str) -> str:
    """Return the errors of a command that ended with status 2, and without a traceback."""
    assert status == 2, errors
    assert "Traceback" not in errors
    return errors
