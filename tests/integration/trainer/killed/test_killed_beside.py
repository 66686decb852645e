"""Trainer, model server and controller killed at random: the same bytes, all versions are back."""

from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import broken_promises
from benchmarks.chaos.trainer import trainer_kills
from tests.support.trainer.scored_episodes import BASE
from tests.support.trainer.zygote import Zygote

KILLS = 15
BESIDE = 6


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(900)
def test_random_kills_of_trainer_model_server_and_controller_change_no_result(
    forks: Zygote,
    tmp_path: Path,
) -> None:
    found = trainer_kills(forks, tmp_path, KILLS, 3)
    for report in found.values():
        assert broken_promises(report) == []
    assert found[BASE]["kills"] == KILLS - BESIDE
    versions = found[BASE]["versions"]
    assert versions["undisturbed"] == versions["killed"] == 4
    beside = found["beside"]
    killed = beside["killed"]
    assert killed["model server"] + killed["controller"] == BESIDE
    # The controller alone brought all back, also once it was killed itself.
    assert len(beside["loaded_without_trainer_s"]) == 2
