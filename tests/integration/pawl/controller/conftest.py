"""A controller of a model server that does not answer, and a model server that does."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.controller.gating import Gating
from tests.support.controller.trials import AWAY, gating
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from trainer.publishing.model_server import Replicas


@pytest.fixture
async def judge(engine: AsyncEngine) -> AsyncIterator[Gating]:
    async with Replicas([AWAY]) as replicas:
        yield gating(engine, replicas)


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    async with fake_model_server() as made:
        yield made
