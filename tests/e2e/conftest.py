"""A whole stack with a real vLLM: embedded PostgreSQL, proxy and trainer as processes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pawl.demo.run import TEMPLATE
from pawl.stack.stack import Stack, StackPlan, running_stack
from pawl.stack.vllm import VllmOptions
from tests.integration.conftest import free_port

POLICY = "calculator"
RECIPE = """
learner = "grpo"
dtype = "float32"
[claim]
group_size = 4
groups = 4
smallest_group = 4
max_age_s = 1e6
[optimizer]
learning_rate = 2e-4
[publish]
tolerance = 0.01
"""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Up once for all tests that need it."""
    folder: Path = tmp_path_factory.mktemp("stack")
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE)
    plan = StackPlan(
        vllm=VllmOptions(
            model=model_dir,
            served_name=POLICY,
            port=free_port(),
            dtype="float32",
            max_model_len=1024,
            max_lora_rank=16,
            tool_parser="pythonic",
            chat_template=TEMPLATE,
        ),
        database_url=None,
        upstream_url=None,
        listen=f"127.0.0.1:{free_port()}",
        admin_listen=f"127.0.0.1:{free_port()}",
        trainer_listen=f"127.0.0.1:{free_port()}",
        data_dir=folder,
        spool_dir=folder / "spool",
        adapter_dir=folder / "adapters",
        log_dir=folder / "logs",
        recipe=str(recipe),
        policy=POLICY,
        model=model_dir,
    )
    async with running_stack(plan) as running:
        yield running
