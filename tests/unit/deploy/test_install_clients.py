"""The clients are installed once, and those of Python without Node where only they are needed."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, which notes in `done` what it would install."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import install_clients

    for name in ("STAMP", "NODE_STAMP"):
        monkeypatch.setattr(install_clients, name, str(tmp_path / name))
    monkeypatch.setattr(install_clients, "MODULES", str(tmp_path))
    install_clients.done = []
    monkeypatch.setattr(
        install_clients, "install_python", lambda: install_clients.done.append("python")
    )
    return install_clients


def run(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str, npm_works: bool = True
) -> list[str]:
    def install_node() -> bool:
        installer.done.append("node")
        return npm_works

    monkeypatch.setattr(installer, "install_node", install_node)
    monkeypatch.setattr(sys, "argv", ["install_clients.py", *arguments])
    installer.done.clear()
    installer.main()
    return list(installer.done)


def test_a_second_run_does_nothing(installer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(installer, monkeypatch) == ["python", "node"]
    assert run(installer, monkeypatch) == []


def test_examples_need_no_node(installer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(installer, monkeypatch, "--python") == ["python"]
    assert run(installer, monkeypatch, "--python") == []
    assert run(installer, monkeypatch) == ["node"]


def test_where_npm_fails_python_is_not_installed_again(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(installer, monkeypatch, npm_works=False) == ["python", "node"]
    assert run(installer, monkeypatch) == ["node"]
