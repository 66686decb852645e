"""A stand-in for the proxy, for tests of Pawl's commands."""

from collections.abc import AsyncIterator

import pytest

from tests.support.servers.fake_proxy import FakeProxy, fake_proxy


@pytest.fixture
async def fake() -> AsyncIterator[FakeProxy]:
    async with fake_proxy() as server:
        yield server
