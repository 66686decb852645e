"""A tiny mixture of experts by the recipe `rollout`: trained, loaded by vLLM, probed, served."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.stack import small_plan
from pawl.stack.stack import Stack, running_stack
from store.database import make_engine
from store.version_queries import list_versions
from store.versions import PolicyVersion
from tests.e2e.conftest import make_episode
from tests.support.mixtures import tiny_model
from tests.support.waiting import eventually
from trainer.batches import bare_row
from trainer.learners.learner import Learner
from trainer.publishing.adapters import SERVED_FILES
from trainer.publishing.model_server import ModelServer
from trainer.recipes.recipe import load_recipe

POLICY = "mixture"
# As `default` trains; each update serves at once, without a trial that needs hundreds of episodes.
RECIPE = "rollout"
# An update of the recipe begins with so many groups of so many episodes.
GROUPS, MEMBERS = 4, 8
UPDATE_S = 800.0


@pytest.fixture(scope="module")
def mixture(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Routers, stacked and shared experts, and a gate; random weights, the packaged model's words.

    Set TEST_MIXTURE to another architecture of `MIXTURES`.
    """
    folder = tmp_path_factory.mktemp("mixture")
    words = AutoTokenizer.from_pretrained(model_dir)
    kind = os.environ.get("TEST_MIXTURE", "qwen2_moe")
    tiny_model(kind, vocab_size=len(words)).save_pretrained(folder)
    for file in Path(model_dir).glob("*token*"):
        shutil.copy(file, folder)
    return str(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(mixture: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Its own: the others' has the packaged model."""
    plan = small_plan(tmp_path_factory.mktemp("mixture"), mixture, POLICY, RECIPE)
    vllm = msgspec.structs.replace(plan.vllm, max_model_len=512)
    async with running_stack(msgspec.structs.replace(plan, vllm=vllm)) as running:
        yield running


async def ask(stack: Stack, session: aiohttp.ClientSession, number: int) -> str:
    """One try of a task, and its reward; the name of the version that answered."""
    task = f"mixture-{number // MEMBERS}"
    return await make_episode(stack, session, task, number, model=POLICY, max_tokens=8)


async def fill(stack: Stack) -> None:
    """What one update of the recipe takes."""
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(ask(stack, session, number) for number in range(GROUPS * MEMBERS)))


async def trained(stack: Stack) -> PolicyVersion:
    """The version that the update made, once it is decided whether it serves."""
    engine = make_engine(stack.database_url)

    async def decided() -> list[PolicyVersion]:
        stack.check()
        async with engine.connect() as connection:
            versions = await list_versions(connection, POLICY)
        return [one for one in versions if one.version and one.state != "written"]

    try:
        return (await eventually(decided, within_s=UPDATE_S))[-1]
    finally:
        await engine.dispose()


async def test_mixture_of_experts_model_is_trained_probed_and_served(
    stack: Stack, mixture: str, tmp_path: Path
) -> None:
    await fill(stack)
    version = await trained(stack)
    # Probed, and promoted.
    assert version.state == "serving", version
    folder = Path(version.adapter_path or "")
    layers = {name.split(".")[-3] for name in load_file(folder / SERVED_FILES[1])}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= layers
    assert not layers & {"gate", "shared_expert_gate", "experts", "base_layer"}

    async with aiohttp.ClientSession() as session:
        numbers = iter(range(GROUPS * MEMBERS, 10**6))

        async def answered() -> bool:
            return await ask(stack, session, next(numbers)) == f"{POLICY}@{version.version}"

        # The proxy reads twice a second which version serves.
        assert await eventually(answered)
    assert await difference(stack, mixture, folder, tmp_path) <= 1e-3


async def difference(stack: Stack, mixture: str, folder: Path, scratch: Path) -> float:
    """The mean between what vLLM serves and what the trainer computes, in nats a token."""
    words = AutoTokenizer.from_pretrained(mixture)
    ids = words("Where does the river end, and where does it begin?")["input_ids"]
    row = bare_row(0, ids[:2], ids[2:])
    learner = Learner(mixture, load_recipe(RECIPE), seed=0, scratch=scratch)
    (own,) = learner.version_logprobs(folder, [row])
    async with ModelServer(f"http://127.0.0.1:{stack.plan.vllm.port}/v1") as server:
        served = await server.prompt_logprobs(f"{POLICY}@{folder.name}", ids)
    return sum(abs(a - b) for a, b in zip(served[1:], own, strict=True)) / len(own)
