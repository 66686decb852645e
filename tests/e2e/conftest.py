"""A whole stack with a real vLLM: embedded PostgreSQL, proxy and trainer as processes."""

import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from benchmarks.stack import small_plan
from pawl.stack import stack as stacks
from pawl.stack.process import Process
from pawl.stack.stack import SERVING, Stack, StackPlan, running_stack
from store.database import make_engine
from store.read.episodes import read_episodes
from store.records import Episode
from store.schema.tables import episodes
from tests.support.shallow import write_shallow
from trainer.updates.versions import begin_policy

ShowNats = Callable[[Mapping[str, float]], None]
Running = AbstractAsyncContextManager[Stack]
POLICY = "calculator"
PATIENCE_S = 400.0
RECIPE = """
learner = "grpo"
dtype = "float32"
[claim]
group_size = 4
groups = 1
[batch]
micro_batch_tokens = 256
[optimizer]
learning_rate = 2e-4
[publish]
control_share = 0.0
tolerance = 0.01
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests on one loop, as they share stacks, and give each its time."""
    for item in items:
        if "tests/e2e" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.e2e)
        if pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


# So deep is the model where any does; the packaged one's whole depth is 30.
LAYERS = int(os.environ.get("TEST_LAYERS", "4"))


@pytest.fixture(scope="session")
def shallow_dir(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a model of the packaged one's words and first layers, for what any model shows.

    It says nothing sensible, as random weights do, in a fourth of the time. Set TEST_LAYERS to
    another depth.
    """
    return str(write_shallow(Path(model_dir), tmp_path_factory.mktemp("shallow"), LAYERS))


def stack_of(model: str, folder: Path) -> Running:
    """Return a stack to be entered, with a recipe whose updates are small."""
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE)
    return running_stack(small_plan(folder, model, POLICY, str(recipe)))


@asynccontextmanager
async def serving_stack(
    plan: StackPlan, *others: str, base: str | None = None
) -> AsyncIterator[Stack]:
    """Run a stack's vLLM, proxy and these others alone, where nothing is trained.

    A trainer computes for as long as many tests before it is ready. `base` is the name of the
    policy's base model, if a file of policies says it.
    """
    make = stacks._make_processes

    def needed(plan: StackPlan, database_url: str) -> list[Process]:
        return [one for one in make(plan, database_url) if one.name in {*SERVING, *others}]

    async with AsyncExitStack() as exits:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stacks, "_make_processes", needed)
            stack = await exits.enter_async_context(running_stack(plan))
        engine = make_engine(stack.database_url)
        # As a trainer does when it starts.
        await begin_policy(engine, plan.vllm.served_name, base, None)
        await engine.dispose()
        yield stack


@pytest.fixture
def show_nats(capsys: pytest.CaptureFixture[str]) -> ShowNats:
    """Print how far trainer and server are from each other, whatever pytest captures."""

    def show(differences: Mapping[str, float]) -> None:
        widest = max(map(len, differences))
        lines = [f"  {name:{widest}}  {nats:.1e}" for name, nats in differences.items()]
        with capsys.disabled():
            sys.stdout.write("\n".join(["", "nats a token, trainer and server:", *lines, ""]))

    return show


async def make_episode(
    stack: Stack, session: aiohttp.ClientSession, task: str, number: int, **body: Any
) -> str:
    """Try a task in an episode of its own, and reward every second; return the version's name."""
    name = f"{task}-{number}"
    url = f"http://{stack.plan.listen}/task/{task}/episode/{name}/v1/chat/completions"
    asked = [{"role": "user", "content": f"Where does the {task} river end?"}]
    async with session.post(url, json={"seed": number, "messages": asked} | body) as reply:
        assert reply.status == 200, await reply.text()
        version = reply.headers["x-pawl-policy"]
    stated = {"episode": name, "value": float(number % 2)}
    async with session.post(stack.feedback_url, json=stated) as reply:
        assert reply.status == 200
    return version


async def episodes_of(connection: AsyncConnection, keys: Collection[str]) -> list[Episode]:
    """Read the episodes of these keys; other tests leave thousands in the same database."""
    found = await connection.scalars(select(episodes.c.id).where(episodes.c.key.in_(keys)))
    return await read_episodes(connection, list(found))
