"""`pawl example` that cannot run says so in one line, and what to do."""

import socket
import sys
from pathlib import Path

import pytest

from benchmarks.stack import free_port
from pawl.commands.local import example


@pytest.fixture(autouse=True)
def _ready_but_for_one_thing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is unpacked or started, whatever becomes of the rest."""
    monkeypatch.setattr("pawl.commands.local.check_torch", lambda: None)
    monkeypatch.setattr("pawl.scenarios.run.unpacked_model", lambda folder: folder)
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str], name: str | None) -> str:
    with pytest.raises(SystemExit) as ended:
        example(name)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, None) == "pawl: name an example, as in `make example NAME=math`"


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no example 'nope': name one of calculator, math" in said(capsys, "nope")


def test_a_missing_framework(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pawl.scenarios.scenario.CLIENTS", tmp_path / "python")
    assert "install it with `make example NAME=math`" in said(capsys, "math")


def test_nothing_to_draw_the_picture_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib, which draws the picture" in said(capsys, "calculator")


def test_a_taken_port(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pawl.stack.stack.check_memory", lambda: None)
    for name in ("PAWL_LISTEN", "PAWL_ADMIN_LISTEN", "PAWL_TRAINER_LISTEN"):
        monkeypatch.setenv(name, f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("PAWL_VLLM_PORT", str(free_port()))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        monkeypatch.setenv("PAWL_STEWARD_LISTEN", address)
        assert f"port {address.rpartition(':')[2]} (steward) is taken" in said(capsys, "calculator")
