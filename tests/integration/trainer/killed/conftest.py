"""Trainers that are killed again and again."""

from collections.abc import Iterator

import pytest

from tests.support.trainer.zygote import Zygote, zygote


@pytest.fixture(scope="package")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """What starts trainers, controllers and model servers in no time."""
    with zygote(tmp_path_factory.mktemp("zygote") / "log") as made:
        yield made
