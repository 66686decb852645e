"""`make install` finds a fitting Python, and installs the clients once."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT

FIND = ROOT / "scripts" / "find_python.sh"
FITS = "#!/bin/sh\nexit 0\n"
UNFIT = "#!/bin/sh\nexit 1\n"


def written(folder: Path, programs: dict[str, str]) -> Path:
    """Write these programs, in which {} is the folder; return the one to stand on PATH."""
    for name, content in programs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.format(folder))
        path.chmod(0o755)
    return folder / "bin"


def found(path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What the search says with nothing but `path` on PATH."""
    return subprocess.run(
        ["/bin/sh", str(FIND)],
        env={"PATH": str(path)} | more,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("programs", "python", "named"),
    [
        ({"bin/python3": FITS, "bin/python3.11": FITS}, "bin/python3", {}),
        (
            {"bin/python3": UNFIT, "bin/python3.11": UNFIT, "bin/python3.12": FITS},
            "bin/python3.12",
            {},
        ),
        (
            {"pyenv/versions/3.12.1/bin/python": FITS, "bin/pyenv": "#!/bin/sh\necho {}/pyenv\n"},
            "pyenv/versions/3.12.1/bin/python",
            {},
        ),
        ({"uv/python": FITS, "bin/uv": "#!/bin/sh\necho {}/uv/python\n"}, "uv/python", {}),
        ({"bin/python3": FITS, "bin/mine": UNFIT}, "bin/mine", {"PYTHON": "mine"}),
    ],
    ids=["python3", "the first that runs and fits", "of pyenv", "of uv", "the user's own"],
)
def test_installer_finds_a_suitable_python_or_uses_the_named_python(
    tmp_path: Path, programs: dict[str, str], python: str, named: dict[str, str]
) -> None:
    path = written(tmp_path, programs)
    assert found(path, **named).stdout.strip() == str(tmp_path / python)


def test_named_python_version_is_found_in_pyenv_or_reported_as_missing(tmp_path: Path) -> None:
    this = "python{}.{}".format(*sys.version_info)
    other = "python3.12" if this != "python3.12" else "python3.13"
    version = tmp_path / "pyenv" / "versions" / f"{this[6:]}.9" / "bin"
    version.mkdir(parents=True)
    (version / "python").symlink_to(sys.executable)
    # As pyenv's shims are: on PATH, and of no use for a version that is not selected.
    path = written(tmp_path, {"bin/pyenv": "#!/bin/sh\necho {}/pyenv\n", f"bin/{this}": UNFIT})
    assert found(path, PYTHON=this).stdout.strip() == str(version / "python")
    done = found(path, PYTHON=other)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no Python ({other[6:]})" in done.stderr


@pytest.mark.parametrize(
    ("named", "said"),
    [({}, "make install PYTHON="), ({"PYTHON": "missing"}, "no missing here")],
    ids=["none fits", "the named one is missing"],
)
def test_installer_without_a_suitable_python_prints_the_remedy(
    tmp_path: Path, named: dict[str, str], said: str
) -> None:
    done = found(written(tmp_path, {"bin/python3": UNFIT}), **named)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("target", "script"),
    [
        ("install", "install"),
        ("demo", "install"),
        ("example", "install"),
        ("check", "install"),
        ("release", "install"),
        ("serving", "serving_tests"),
    ],
)
def test_make_runs_the_installation_with_the_python_that_was_found(
    tmp_path: Path, target: str, script: str
) -> None:
    path = written(tmp_path, {"bin/python3": UNFIT})
    (path / "python3.11").symlink_to(sys.executable)
    (path / "make").symlink_to(str(shutil.which("make")))
    (tmp_path / "scripts").mkdir()
    shutil.copy(FIND, tmp_path / "scripts")
    (tmp_path / "scripts" / f"{script}.py").write_text("raise SystemExit('it was run')\n")
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", target],
        cwd=tmp_path,
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "it was run" in done.stderr


# The clients


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
    monkeypatch.setattr(install_clients, "install_prometheus", lambda: None)
    return install_clients


@pytest.mark.parametrize(
    "runs",
    [
        [((), True, ["python", "node"]), ((), True, [])],
        [
            (("--python",), True, ["python"]),
            (("--python",), True, []),
            ((), True, ["node"]),
        ],
        [((), False, ["python", "node"]), ((), True, ["node"])],
    ],
    ids=["a second run does nothing", "examples need no Node", "only what failed is tried again"],
)
def test_installed_client_programs_are_not_installed_again(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    runs: list[tuple[tuple[str, ...], bool, list[str]]],
) -> None:
    for arguments, npm_works, installed in runs:

        def install_node(works: bool = npm_works) -> bool:
            installer.done.append("node")
            return works

        monkeypatch.setattr(installer, "install_node", install_node)
        monkeypatch.setattr(sys, "argv", ["install_clients.py", *arguments])
        installer.done.clear()
        installer.main()
        assert installer.done == installed
