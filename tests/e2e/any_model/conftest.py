"""A stack whose model is shallow: what is shown here, any model shows."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pawl.stack.stack import Stack
from tests.e2e.conftest import stack_of
from tests.support.training import recipe
from trainer.learners.learner import Learner


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(shallow_dir: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Run one stack for this folder's tests; it is gone when their worker takes other files."""
    async with stack_of(shallow_dir, tmp_path_factory.mktemp("shallow-stack")) as running:
        yield running


@pytest.fixture(scope="package")
def learner(shallow_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    """Load the model once, for what a server's log-probabilities are compared with.

    It stands at whatever version the test before left it at: each restores the one it asks about.
    """
    return Learner(shallow_dir, recipe(), seed=0, scratch=tmp_path_factory.mktemp("learner"))
