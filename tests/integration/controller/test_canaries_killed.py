"""Processes are killed while episodes decide about versions: nothing is lost or done twice.

`python -m benchmarks.chaos --target canaries` and `--target evaluated` do the same with more kills.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.chaos.__main__ import broken_promises
from tests.support.controller.canary_kills import canary_kills
from tests.support.trainer.zygote import Zygote, zygote

KILLS = 8


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """What starts trainers, controllers and model servers in no time."""
    with zygote(tmp_path_factory.mktemp("zygote") / "log") as made:
        yield made


@pytest.mark.usefixtures("own_cluster")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["canary", "evaluated"])
def test_each_change_of_a_versions_state_is_made_once_despite_process_kills(
    forks: Zygote, tmp_path: Path, mode: Literal["canary", "evaluated"]
) -> None:
    found = canary_kills(forks, tmp_path, KILLS, 5, mode)[mode]
    assert sum(found["killed"].values()) == KILLS
    assert found["episodes_scored"] > 0
    assert broken_promises(found) == []
