"""Write tiny random models of the families that people train."""

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig

from tests.support.training import write_words
from trainer.learners.model import loader_of

WORDS: Final = 97
# A text model of each family: four heads of eight, two of them for keys and values.
TEXT: Final[dict[str, Any]] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
WINDOW: Final[dict[str, Any]] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
LINEAR: Final[dict[str, Any]] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED: Final[dict[str, Any]] = {"shared_expert_intermediate_size": 16}
VISION: Final[dict[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
MROPE: Final[dict[str, Any]] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
MAMBA: Final[dict[str, Any]] = {
    "layers_block_type": ["mamba", "attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "ssm_state_size": 8,
    "chunk_size": 8,
}

# By model type: what its configuration adds, and the way that it is computed.
FAMILIES: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "llama": ({}, "tree"),
    "qwen2": ({}, "tree"),
    "qwen3": ({}, "tree"),
    "qwen3_moe": (EXPERTS, "tree"),
    "mistral": ({"sliding_window": None}, "tree"),
    "mixtral": ({"num_local_experts": 4, "sliding_window": None}, "tree"),
    "phi3": ({}, "tree"),
    "smollm3": ({}, "tree"),
    "glm4": ({}, "tree"),
    "granite": ({"logits_scaling": 4.0}, "tree"),
    "gemma2": (WINDOW | {"query_pre_attn_scalar": 8}, "chain"),
    "gemma3_text": (WINDOW | {"query_pre_attn_scalar": 8}, "chain"),
    "gemma3": ({"text_config": TEXT | WINDOW, "vision_config": VISION}, "chain"),
    "olmo3": (WINDOW, "chain"),
    "qwen3_next": (EXPERTS | SHARED | LINEAR, "chain"),
    "qwen3_5": ({"text_config": TEXT | LINEAR, "vision_config": VISION}, "chain"),
    "qwen3_5_moe": (
        {"text_config": TEXT | EXPERTS | SHARED | LINEAR, "vision_config": VISION},
        "chain",
    ),
    "gpt_oss": (WINDOW | {"num_local_experts": 4}, "chain"),
    "qwen2_5_vl": ({"text_config": TEXT | MROPE, "vision_config": VISION}, "tree"),
    "qwen3_vl": ({"text_config": TEXT | MROPE, "vision_config": VISION}, "tree"),
    "mistral3": (
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        },
        "tree",
    ),
    "llama4": (
        {
            "text_config": TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 48},
            "vision_config": VISION,
        },
        "chain",
    ),
    "nemotron_h": (MAMBA, "chain"),
    "deepseek_v3": (LATENT, "tree"),
}


def write_family(folder: Path, kind: str) -> str:
    """Write a model of the family `kind`, of random weights, with a tokenizer of 97 words."""
    torch.manual_seed(0)
    extra, _ = FAMILIES[kind]
    given = extra if "text_config" in extra else TEXT | extra
    config = AutoConfig.for_model(kind, **given)
    loader_of(config).from_config(config).save_pretrained(folder)
    write_words(folder)
    return str(folder)
