"""`make install` finds a fitting Python."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

FIND = ROOT / "scripts" / "find_python.sh"
FITS = "#!/bin/sh\nexit 0\n"
UNFIT = "#!/bin/sh\nexit 1\n"


def programs(folder: Path, **contents: str) -> Path:
    """A folder to stand on PATH, with these programs; `_` in a name is a dot."""
    folder.mkdir(parents=True)
    for name, content in contents.items():
        path = folder / name.replace("_", ".")
        path.write_text(content)
        path.chmod(0o755)
    return folder


def found(path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What the search says with nothing but `path` on PATH."""
    return subprocess.run(
        ["/bin/sh", str(FIND)],
        env={"PATH": str(path)} | more,
        capture_output=True,
        text=True,
        check=False,
    )


def test_python3_is_taken_where_it_fits(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", python3=FITS, python3_11=FITS)
    assert found(path).stdout.strip() == str(path / "python3")


def test_otherwise_the_first_that_runs_and_fits(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", python3=UNFIT, python3_11=UNFIT, python3_12=FITS)
    assert found(path).stdout.strip() == str(path / "python3.12")


def test_then_what_pyenv_has(tmp_path: Path) -> None:
    version = programs(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin", python=FITS)
    path = programs(tmp_path / "bin", pyenv=f"#!/bin/sh\necho {tmp_path / 'pyenv'}\n")
    assert found(path).stdout.strip() == str(version / "python")


def test_then_what_uv_knows(tmp_path: Path) -> None:
    other = programs(tmp_path / "uv", python=FITS) / "python"
    path = programs(tmp_path / "bin", uv=f"#!/bin/sh\necho {other}\n")
    assert found(path).stdout.strip() == str(other)


def test_a_version_that_the_user_names_is_found_wherever_it_is(tmp_path: Path) -> None:
    this = "python{}.{}".format(*sys.version_info)
    other = "python3.12" if this != "python3.12" else "python3.13"
    version = tmp_path / "pyenv" / "versions" / f"{this[6:]}.9" / "bin"
    version.mkdir(parents=True)
    (version / "python").symlink_to(sys.executable)
    # As pyenv's shims are: on PATH, and of no use for a version that is not selected.
    path = programs(tmp_path / "bin", pyenv=f"#!/bin/sh\necho {tmp_path / 'pyenv'}\n")
    (path / this).write_text(UNFIT)
    (path / this).chmod(0o755)
    assert found(path, PYTHON=this).stdout.strip() == str(version / "python")
    done = found(path, PYTHON=other)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no Python ({other[6:]})" in done.stderr


def test_what_the_user_names_goes_first(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", python3=FITS, mine=UNFIT)
    assert found(path, PYTHON="mine").stdout.strip() == str(path / "mine")
    done = found(path, PYTHON="missing")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no missing here" in done.stderr


def test_where_none_fits_it_says_what_to_do(tmp_path: Path) -> None:
    done = found(programs(tmp_path / "bin", python3=UNFIT))
    assert (done.returncode, done.stdout) == (1, "")
    assert "make install PYTHON=" in done.stderr


@pytest.mark.parametrize(
    ("target", "script"),
    [
        ("install", "install"),
        ("demo", "install"),
        ("example", "install"),
        ("check", "install"),
        ("serving", "serving_tests"),
    ],
)
def test_make_runs_the_installation_with_what_was_found(
    tmp_path: Path, target: str, script: str
) -> None:
    path = programs(tmp_path / "bin", python3=UNFIT)
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
