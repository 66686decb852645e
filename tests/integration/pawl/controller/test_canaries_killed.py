"""Processes are killed while live episodes decide about versions: nothing is lost or done twice.

`python -m benchmarks.chaos --target canaries` does the same with more kills.
"""

from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import broken_promises
from tests.support.controller.canary_kills import canary_kills

KILLS = 8


@pytest.mark.timeout(900)
def test_each_change_is_made_once_whoever_is_killed(tmp_path: Path) -> None:
    found = canary_kills(tmp_path, KILLS, seed=5)["canaries"]
    assert sum(found["killed"].values()) == KILLS
    assert found["changes"]["loaded → canary"] >= 1
    assert found["episodes_scored"] > 0
    assert broken_promises(found) == []
