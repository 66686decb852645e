"""A whole stack with a real vLLM: embedded PostgreSQL, proxy and trainer as processes."""

import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from benchmarks.small_stack import small_plan
from pawl.stack.stack import Stack, running_stack
from store.read.episodes import read_episodes
from store.records import Episode
from store.schema.recorded import episodes

ShowNats = Callable[[Mapping[str, float]], None]
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


@pytest.fixture
def show_nats(capsys: pytest.CaptureFixture[str]) -> ShowNats:
    """Print how far trainer and server are from each other, whatever pytest captures."""

    def show(differences: Mapping[str, float]) -> None:
        widest = max(map(len, differences))
        lines = [f"  {name:{widest}}  {nats:.1e}" for name, nats in differences.items()]
        with capsys.disabled():
            sys.stdout.write("\n".join(["", "nats a token, trainer and server:", *lines, ""]))

    return show


async def episodes_of(connection: AsyncConnection, keys: Collection[str]) -> list[Episode]:
    """Read the episodes of these keys; other tests leave thousands in the same database."""
    found = await connection.scalars(select(episodes.c.id).where(episodes.c.key.in_(keys)))
    return await read_episodes(connection, list(found))
