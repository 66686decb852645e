"""Where torch cannot be imported, the commands that need it say so in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture
def broken_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch is a build for another machine."""
    fault = "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
    (tmp_path / "torch.py").write_text(fault)
    return {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


@pytest.mark.parametrize("command", ["trainer", "demo"])
def test_one_line_says_what_to_do(
    command: str, broken_torch: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pawl.cli", command],
        cwd=tmp_path,
        env=broken_torch,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("pawl: the trainer cannot be imported: ImportError: libcudart.so.13")
    assert "make install PYTHON=python3.11" in line
