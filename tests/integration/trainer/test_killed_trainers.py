"""Two trainers over the same episodes, each killed apart from the other: the same bytes of both."""

from pathlib import Path

import pytest

from benchmarks.chaos.trainer.kills import trainer_kills

KILLS = 8
UPDATES = 4


@pytest.mark.timeout(300)
def test_two_policies_killed_at_random(tmp_path: Path) -> None:
    found = trainer_kills(tmp_path, KILLS, 3, policies=2)
    for policy in ("writer", "checker"):
        report = found[policy]
        for promise in ("lost", "twice", "spent_otherwise", "states_differ", "files_differ"):
            assert report[promise] == [], (policy, promise)
        assert report["by_themselves"] == [], policy
        assert report["kills"] == KILLS // 2
        assert report["versions"] == {"undisturbed": UPDATES, "killed": UPDATES}
    writer, checker = (found[policy]["final_adapter"] for policy in ("writer", "checker"))
    assert writer != checker
    assert found["ledger"] == {
        "episodes_begun_by": {"checker": 10, "planner": 11, "writer": 11},
        "calls_answered_by": {"checker": 64, "no policy": 22, "rest": 64, "writer": 64},
        "of_untrained": [],
    }
