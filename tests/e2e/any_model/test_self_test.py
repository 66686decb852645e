"""The check before the first claim, against a real vLLM: unfit settings are named."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pawl.stack.stack import Stack
from tests.support.training import recipe
from trainer.learners.learner import Learner
from trainer.learners.model import Base
from trainer.publishing.model_server import Replicas
from trainer.recipes.recipe import LoraOptions, PublishOptions, Recipe
from trainer.updates.self_test import ServerSelfTest

# The stack's own trainer tries its policy whenever it comes up: the two must not take the other's.
TRIED = "tried"


def with_lora(**lora: Any) -> Recipe:
    changes = {"lora": LoraOptions(**lora), "publish": PublishOptions(tolerance=0.01)}
    return recipe().model_copy(update=changes)


async def why_servers_fail(
    stack: Stack, model: str | Base, chosen: Recipe, folder: Path
) -> str | None:
    url = f"http://127.0.0.1:{stack.plan.vllm.port}/v1"
    learner = Learner(model, chosen, seed=0, scratch=folder)
    async with Replicas([url]) as servers:
        why = await ServerSelfTest(learner, folder, servers, TRIED, chosen).why_servers_fail()
        assert f"{TRIED}@self-test" not in await servers.models()
    assert not list(folder.glob("self-test"))
    return why


# PEFT, of the layer that no server can serve.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
async def test_self_test_passes_servable_lora_settings_and_names_unservable_settings(
    stack: Stack, learner: Learner, tmp_path: Path
) -> None:
    base = learner._base
    assert await why_servers_fail(stack, base, with_lora(rank=4), tmp_path) is None
    high = with_lora(rank=256, target_modules=["q_proj", "v_proj"])
    too_high = await why_servers_fail(stack, base, high, tmp_path)
    assert "--max-lora-rank" in (too_high or "")
    odd_layers = with_lora(rank=4, target_modules=["embed_tokens"])
    why = await why_servers_fail(stack, base, odd_layers, tmp_path)
    assert "lora.target_modules" in (why or "")


async def test_self_test_names_pawl_model_if_trainer_and_server_have_different_base_weights(
    stack: Stack, shallow_dir: str, tmp_path: Path
) -> None:
    """The same layers and words, other weights: as a model's next release."""
    model = AutoModelForCausalLM.from_pretrained(shallow_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    other = tmp_path / "other"
    model.save_pretrained(other)
    for file in Path(shallow_dir).glob("*token*"):
        shutil.copy(file, other)
    # Each kind of layer is tried by itself as well: two show it.
    few = with_lora(rank=4, target_modules=["q_proj", "v_proj"])
    why = await why_servers_fail(stack, str(other), few, tmp_path)
    assert "PAWL_MODEL" in (why or "")
