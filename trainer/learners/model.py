"""Load the model in training: a frozen base and one LoRA adapter, in the recipe's precision."""

import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.errors import LearnerError
from trainer.learners.kernels.lean import make_adapter_lean, make_base_lean
from trainer.recipes.recipe import Recipe

TASK = "CAUSAL_LM"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def precision(recipe: Recipe, device: str) -> torch.dtype:
    """Return the dtype of the frozen base on `device`, which is "cpu" or "cuda:…"."""
    if recipe.dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return DTYPES[recipe.dtype]


def load_base(model: str, recipe: Recipe) -> tuple[Any, Any]:
    """Load the causal LM and its tokenizer, onto the GPU if there is one.

    Raises:
        LearnerError: the model cannot be loaded.
    """
    # Each of several processes on one host has its own GPU.
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        base = AutoModelForCausalLM.from_pretrained(
            model, dtype=precision(recipe, device), attn_implementation="sdpa"
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise LearnerError(
            f"the model {model!r} cannot be loaded: {error}; set PAWL_MODEL to the folder or name"
            " of a causal language model"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    base.to(device)
    make_base_lean(base)
    if recipe.batch.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return base, tokenizer


def attach_adapter(base: Any, recipe: Recipe, adapter: Path | None, seed: int) -> PeftModel:
    """Return `base` with the adapter in `adapter`, or with a new one, whose effect is zero."""
    model = _adapted(base, recipe, adapter, seed)
    for config in model.peft_config.values():
        if isinstance(config.target_modules, set):
            # A set is written in an order that differs between processes: the same update would
            # have other bytes.
            config.target_modules = sorted(config.target_modules)
    make_adapter_lean(model)
    return model


def _adapted(base: Any, recipe: Recipe, adapter: Path | None, seed: int) -> PeftModel:
    if adapter is not None:
        config = LoraConfig.from_pretrained(str(adapter))
        # An adapter from elsewhere may have others. Pawl trains without dropout, and whatever the
        # weights began as, they are read now.
        config.lora_dropout, config.init_lora_weights, config.task_type = 0.0, True, TASK
        return PeftModel.from_pretrained(base, str(adapter), config=config, is_trainable=True)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=recipe.lora.rank,
        lora_alpha=recipe.lora.alpha,
        lora_dropout=0.0,
        target_modules=recipe.lora.target_modules,
        task_type=TASK,
    )
    try:
        return get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise LearnerError(
            f"no adapter can be made: {error}; set lora.target_modules to names of linear layers of"
            ' the model, or leave it at "all-linear"'
        ) from error
