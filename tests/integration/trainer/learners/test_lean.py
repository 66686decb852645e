"""Lighter forwards: the same numbers and gradients; similar layers keep their own."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.support.trainer.merging import TINY, make_model
from trainer.learners.kernels.layers import add_product, make_adapter_lean, make_base_lean, product

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def lightened(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


def test_similar_looking_layers_keep_their_own_forward() -> None:
    qwen = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    make_base_lean(qwen)
    assert lightened(qwen) == {"Qwen2MLP", "Qwen2RMSNorm"}
    # Another activation, and norms with a weight around zero.
    gemma = GemmaForCausalLM(GemmaConfig(**SHAPE, head_dim=8))
    make_base_lean(gemma)
    assert lightened(gemma) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lean_layers_score_like_the_models_own_layers(dtype: torch.dtype) -> None:
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        ours = make_model(TINY, dtype)(input_ids=ids).logits.float()
        own = make_model(TINY, dtype, lean=False)(input_ids=ids).logits.float()
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    assert float((ours - own).abs().max()) < limit * float(own.abs().max())


def test_adapter_can_be_disabled_and_enabled_again() -> None:
    model = make_model(TINY, torch.float32)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        with_adapter = model(input_ids=ids).logits
        with model.disable_adapter():
            without = model(input_ids=ids).logits
        back = model(input_ids=ids).logits
    assert not torch.allclose(with_adapter, without)
    assert torch.equal(with_adapter, back)


def test_adapters_with_dropout_dora_or_bias_keep_their_own_forward() -> None:
    for more in ({"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}):
        base = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
        model = get_peft_model(base, config)
        make_adapter_lean(model)
        assert lightened(model) == set()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_matrix_products_are_as_precise_as_their_operands(batch: tuple[int, ...]) -> None:
    settings: Any = torch.backends.mkldnn
    before = settings.matmul.fp32_precision
    left, right = torch.randn(*batch, 192, 64), torch.randn(*batch, 64, 192)
    wanted = left.double() @ right.double()
    for operand in (right, right.mT.contiguous().mT):
        assert float((product(left, operand) - wanted).abs().max()) < 1e-4
    # Half precision would be wrong by 1e-2.
    if not batch:
        total = torch.ones(192, 192)
        add_product(total, left, right)
        assert float((total - 1 - wanted).abs().max()) < 1e-4
    assert settings.matmul.fp32_precision == before
