"""A controller that decides, and a model server."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from controller.gate import Gate
from tests.support.controller.trials import controller
from tests.support.servers.fake_server import FakeModelServer, fake_model_server


@pytest.fixture
def judge(engine: AsyncEngine) -> Gate:
    return controller(engine)


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    async with fake_model_server() as made:
        yield made
