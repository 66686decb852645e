"""The compiled proxy behaves as its sources: the unit tests of `proxy/` hold for both.

Not so for functions whose annotations are read at run time: where their evaluation is postponed,
Cython keeps texts. Nothing in `proxy/` but the settings reads any, and those are not compiled.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.wheel import installed_wheel
from tests.conftest import ROOT

MINUTES = 20


def test_reading_a_long_conversation_lets_the_event_loop_have_the_gil() -> None:
    """Compiled code never does; the generator of a conversation's members is run by Python."""
    assert list((installed_wheel() / "proxy" / "formats").glob("contents.*")) == [
        installed_wheel() / "proxy" / "formats" / "contents.py"
    ]


@pytest.mark.timeout(2 * MINUTES * 60)
def test_the_unit_tests_of_the_proxy_hold_for_the_wheel(tmp_path: Path) -> None:
    wheel = installed_wheel()
    # Tests import what lies beside them: a checkout whose `proxy/` is the wheel's.
    for path in ROOT.iterdir():
        if path.name not in ("proxy", "var", "tests"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "proxy").symlink_to(wheel / "proxy")
    (tmp_path / "tests").mkdir()
    for path in (ROOT / "tests").iterdir():
        (tmp_path / "tests" / path.name).symlink_to(path)
    probe = "import proxy.calls.call as h; assert h.__file__.endswith('.so'), h.__file__"
    subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'temp'}", "tests/unit/proxy"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=MINUTES * 60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
