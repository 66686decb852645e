"""Make the models that are measured: each a PEFT model whose adapter has an effect."""

from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trainer.learners.kernels.lean import make_adapter_lean, make_base_lean
from trainer.learners.merging import why_separate

RANK: Final = 16

TINY: Final = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)
# The shape of SmolLM2-135M, for machines that do not have its weights.
SMALL: Final = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
BILLION: Final = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def make_model(
    source: LlamaConfig | Path, dtype: torch.dtype, device: str = "cpu", *, lean: bool = True
) -> Any:
    """Load the model in a folder, or make one of random weights; the same weights each time.

    `lean` False leaves transformers' and PEFT's own code as it is: the reference.
    """
    torch.manual_seed(0)
    if isinstance(source, Path):
        base = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa")
    else:
        with torch.device(device):
            base = LlamaForCausalLM._from_config(
                deepcopy(source), dtype=dtype, attn_implementation="sdpa"
            )
    base.to(device)
    if lean:
        make_base_lean(base)
    torch.manual_seed(1)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if dtype == torch.float64:
        model.double()
    if lean:
        make_adapter_lean(model)
        why = why_separate(model)
        assert why is None, why
    model.train()
    return model
