"""The packaged model, which says something sensible, behind a proxy."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.stack import small_plan
from pawl.stack.stack import Stack
from tests.e2e.conftest import POLICY, serving_stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Run one stack for this folder's tests; it is gone when their worker takes other files."""
    plan = small_plan(tmp_path_factory.mktemp("stack"), model_dir, POLICY, "default")
    async with serving_stack(plan) as running:
        yield running
