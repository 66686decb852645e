"""A real trainer, killed with SIGKILL at every boundary of its steps: the same bytes."""

from pathlib import Path

import pytest

from benchmarks.chaos.trainer import Task, compare_runs
from tests.support.trainer.scored_episodes import BASE
from tests.support.trainer.zygote import Zygote

UPDATES = 14


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(900)
def test_trainer_killed_at_every_step_boundary_writes_the_same_version_files(
    forks: Zygote,
    tmp_path: Path,
) -> None:
    task = Task(tmp_path, UPDATES, 1)
    found = compare_runs(forks, task, lambda run, _: run.kill_at_each_boundary())[BASE]
    for promise in ("lost", "twice", "spent_otherwise", "states_differ", "files_differ"):
        assert found[promise] == [], promise
    assert found["by_themselves"] == []
    assert not [how for how in found["killed"] if how.startswith("at random")]
    assert found["versions"] == {"undisturbed": UPDATES, "killed": UPDATES}
    assert found["updates_abandoned"] > 5
    assert found["updates_finished_late"] >= 1
