"""Processes are killed while live episodes decide about versions: nothing is lost or done twice.

8 kills; 200 with `--hypothesis-profile=long`.
"""

from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import broken_promises
from tests.fuzz.profile import is_long
from tests.support.steward.canary_kills import canary_kills

KILLS = 200 if is_long() else 8


@pytest.mark.timeout(0 if is_long() else 900)
def test_each_change_is_made_once_whoever_is_killed(tmp_path: Path) -> None:
    found = canary_kills(tmp_path, KILLS, seed=5)["canaries"]
    assert sum(found["killed"].values()) == KILLS
    assert found["changes"]["candidate → canary"] >= 1
    assert found["episodes_scored"] > 0
    assert broken_promises(found) == []
