"""Nothing falls between the two runs of the tests: CI runs both, and what is listed exists."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.tiers import SLOW, is_slow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("listed", SLOW)
def test_slow_test_is_known_by_its_folder_its_file_or_its_name(listed: str) -> None:
    assert (ROOT / listed.partition("::")[0]).exists(), f"tests/tiers.py: there is no {listed}"
    assert all(is_slow(listed + rest) for rest in ("", "/test_it.py::test_it", "::test_it", "[1]"))
    assert not is_slow(f"{listed}_of_others")
    assert not is_slow(f"other/{listed}")


@pytest.mark.parametrize(
    ("target", "selected"),
    [
        (["test"], '--maxprocesses 4 -m "not slow"'),
        (["test", "ARGS=-k rewards"], "--maxprocesses 4 -k rewards"),
        (["slow"], "--maxprocesses 2 -m slow"),
        (["slow", "ARGS=-x"], "--maxprocesses 2 -m slow -x"),
    ],
)
def test_make_test_and_make_slow_select_tests_by_the_slow_mark_or_the_given_args(
    target: list[str], selected: str
) -> None:
    command = ["make", "--dry-run", "--no-print-directory", *target]
    # Not what the make that runs these tests was told.
    apart = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    apart.pop("ARGS", None)
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=apart)
    last = shown.stdout.splitlines()[-1]
    assert "-m pytest" in last
    assert last.rstrip().endswith(f"--numprocesses auto {selected}")


def test_ci_runs_make_test_make_slow_and_make_compose_test() -> None:
    wanted = ["make test", "make slow", "make compose-test"]
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [one for one in lines if one in wanted] == wanted
