"""Trainers in this process, on real tables and scripted model servers."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.trainer.bench import Bench
from tests.support.trainer.policies import Policies

if TYPE_CHECKING:
    from tests.support.training import Renew


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    async with fake_model_server() as found:
        yield found


@pytest.fixture
def bare(engine: AsyncEngine, server: FakeModelServer, tmp_path: Path) -> Bench:
    """A trainer of the policy `m` without an episode."""
    return Bench(engine, server, tmp_path)


@pytest.fixture
async def bench(bare: Bench) -> Bench:
    """A trainer of the policy `m` with two claimable groups of two."""
    await bare.fill()
    return bare


@pytest.fixture
def policies(engine: AsyncEngine, server: FakeModelServer, tmp_path: Path) -> Policies:
    """A trainer of two policies without an episode."""
    return Policies(engine, server, tmp_path)


@pytest.fixture(scope="module")
def renew(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> "Renew":
    """Give the file's learner of the tiny model, as if a recipe had just made it.

    The learner of the test before is gone then.
    """
    from tests.support.training import recipe, renewed
    from trainer.learners.learner import Learner

    folder = tmp_path_factory.mktemp("learner")
    return partial(renewed, Learner(tiny_model, recipe(), seed=0, scratch=folder))
