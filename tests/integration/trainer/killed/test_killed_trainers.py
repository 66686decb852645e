"""Two policies over the same episodes, trained apart or together, and killed: the same bytes."""

from pathlib import Path

import pytest

from benchmarks.chaos.trainer import trainer_kills
from tests.support.trainer.zygote import Zygote

KILLS = 8
UPDATES = 4


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shared", [False, True])
def test_trainers_of_two_policies_killed_at_random_write_the_same_version_files(
    forks: Zygote, tmp_path: Path, shared: bool
) -> None:
    """A trainer for each, each killed apart from the other; or one trainer of both."""
    found = trainer_kills(forks, tmp_path, KILLS, 3, policies=2, shared=shared, plain=True)
    for policy in ("writer", "checker"):
        report = found[policy]
        for promise in ("lost", "twice", "spent_otherwise", "states_differ", "files_differ"):
            assert report[promise] == [], (policy, promise)
        assert report["by_themselves"] == [], policy
        assert report["kills"] == (KILLS if shared else KILLS // 2)
        assert report["versions"] == {"undisturbed": UPDATES, "killed": UPDATES}
    writer, checker = (found[policy]["final_adapter"] for policy in ("writer", "checker"))
    assert writer != checker
    assert found["ledger"] == {
        "episodes_begun_by": {"checker": 10, "planner": 11, "writer": 11},
        "calls_answered_by": {"checker": 64, "no policy": 22, "rest": 64, "writer": 64},
        "of_untrained": [],
    }
