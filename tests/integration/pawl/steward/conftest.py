"""A steward of a model server that does not answer, and a model server that does."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.steward.gating import Gating
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.steward.trials import AWAY, gating
from trainer.publishing.model_server import Replicas


@pytest.fixture
async def judge(engine: AsyncEngine) -> AsyncIterator[Gating]:
    async with Replicas([AWAY]) as replicas:
        yield gating(engine, replicas)


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    async with fake_model_server() as made:
        yield made
