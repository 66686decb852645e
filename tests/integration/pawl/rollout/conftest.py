"""What `pawl rollout` is run with."""

from pathlib import Path

import pytest

from tests.support.rollouts import TASKS, Runner
from tests.support.servers.fake_proxy import FakeProxy


@pytest.fixture
def runner(fake: FakeProxy, tmp_path: Path) -> Runner:
    return Runner(tmp_path, fake.url, TASKS)
