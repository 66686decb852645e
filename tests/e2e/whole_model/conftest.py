"""A stack with the packaged model, which says something sensible."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pawl.stack.stack import Stack
from tests.e2e.conftest import stack_of


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Run one stack for this folder's tests; it is gone when their worker takes other files."""
    async with stack_of(model_dir, tmp_path_factory.mktemp("stack")) as running:
        yield running
