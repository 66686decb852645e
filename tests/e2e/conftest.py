"""A whole stack with a real vLLM: embedded PostgreSQL, proxy and trainer as processes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.small_stack import small_plan
from pawl.stack.stack import Stack, running_stack

POLICY = "calculator"
PATIENCE_S = 400.0
RECIPE = """
learner = "grpo"
dtype = "float32"
[claim]
group_size = 4
groups = 4
smallest_group = 4
max_age_s = 20
[optimizer]
learning_rate = 2e-4
[publish]
tolerance = 0.01
"""


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Run one stack for this folder's tests; it is gone when their worker takes other files."""
    folder: Path = tmp_path_factory.mktemp("stack")
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE)
    async with running_stack(small_plan(folder, model_dir, POLICY, str(recipe))) as running:
        yield running
