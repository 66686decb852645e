"""Processes are killed while episodes decide about versions: nothing is lost or done twice.

`python -m benchmarks.chaos --target canaries` and `--target evaluated` do the same with more kills.
"""

from pathlib import Path
from typing import Literal

import pytest

from benchmarks.chaos.__main__ import broken_promises
from tests.support.controller.canary_kills import canary_kills

KILLS = 8


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["canary", "evaluated"])
def test_each_change_of_a_versions_state_is_made_once_despite_process_kills(
    tmp_path: Path, mode: Literal["canary", "evaluated"]
) -> None:
    found = canary_kills(tmp_path, KILLS, 5, mode)[mode]
    assert sum(found["killed"].values()) == KILLS
    assert found["episodes_scored"] > 0
    assert broken_promises(found) == []
