"""Make tiny models of many architectures, dense ones and mixtures of experts."""

from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    # Large enough that a change of the hidden states is seen in the probabilities.
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
FOUR: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR: Final[dict[str, Any]] = {
    "shared_expert_intermediate_size": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT: Final = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DENSE: Final[dict[str, dict[str, Any]]] = {"llama": {}, "qwen2": {}, "qwen3": {}}
MIXTURES: Final[dict[str, dict[str, Any]]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": FOUR | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": FOUR | {"norm_topk_prob": True},
    "qwen3_next": FOUR | LINEAR,
    "qwen3_5_moe_text": FOUR | LINEAR,
    "deepseek_v2": FOUR | LATENT | {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": FOUR | LATENT | {"q_lora_rank": 16},
    "olmoe": FOUR,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": FOUR
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "phimoe": {"num_local_experts": 4},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0}},
}


def tiny_config(kind: str, **more: Any) -> Any:
    """Return the configuration of a tiny model of an architecture of `DENSE` or `MIXTURES`."""
    return CONFIG_MAPPING[kind](**SIZES | (DENSE | MIXTURES)[kind] | more)


def tiny_model(kind: str, seed: int = 0, **more: Any) -> Any:
    """Return a tiny model with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(kind, **more))


def outline(kind: str) -> Any:
    """Return a tiny model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(kind))
