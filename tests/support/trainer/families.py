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
FOUR: Final[dict[str, Any]] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: Final[dict[str, Any]] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
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
MAMBA2: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
OF_GPT: Final[dict[str, Any]] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 4096}
PER_LAYER: Final[dict[str, Any]] = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": WORDS,
}
# Factors by the served context, as those of Phi-3.5 and Phi-4-mini.
LONG: Final[dict[str, Any]] = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 64,
    },
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
    "gemma2": (WINDOW | {"query_pre_attn_scalar": 8}, "stretches"),
    "gemma3_text": (WINDOW | {"query_pre_attn_scalar": 8}, "stretches"),
    "gemma3": ({"text_config": TEXT | WINDOW, "vision_config": VISION}, "stretches"),
    "olmo3": (WINDOW, "stretches"),
    "qwen3_next": (EXPERTS | SHARED | LINEAR, "stretches"),
    "qwen3_5": ({"text_config": TEXT | LINEAR, "vision_config": VISION}, "stretches"),
    "qwen3_5_moe": (
        {"text_config": TEXT | EXPERTS | SHARED | LINEAR, "vision_config": VISION},
        "stretches",
    ),
    "gpt_oss": (WINDOW | {"num_local_experts": 4}, "stretches"),
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
        "stretches",
    ),
    "nemotron_h": (MAMBA, "stretches"),
    "deepseek_v3": (LATENT, "tree"),
}
# Others that transformers trains and vLLM serves.
OTHERS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "afmoe": (
        EXPERTS
        | {
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "layer_types": ["full_attention", "full_attention"],
        },
        "stretches",
    ),
    "apertus": ({}, "tree"),
    "arcee": ({}, "tree"),
    "bamba": (MAMBA2 | {"attn_layer_indices": [1]}, "stretches"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "stretches"),
    "cohere": ({}, "tree"),
    "cohere2": (WINDOW, "stretches"),
    "cohere2_moe": (EXPERTS, "stretches"),
    "dbrx": (
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 4096,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {
                "hidden_size": 32,
                "ffn_hidden_size": 16,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
        "tree",
    ),
    "deepseek_v2": (
        LATENT | {"topk_method": "greedy", "n_shared_experts": 1, "first_k_dense_replace": 1},
        "tree",
    ),
    "dots1": (ROUTED, "stretches"),
    "ernie4_5": ({}, "tree"),
    "ernie4_5_moe": (
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        "tree",
    ),
    "exaone4": (WINDOW, "stretches"),
    "exaone_moe": (EXPERTS | WINDOW, "stretches"),
    "falcon": ({"new_decoder_architecture": True, "num_kv_heads": 2}, "stretches"),
    "falcon_h1": (MAMBA2 | {"mamba_d_ssm": 64}, "stretches"),
    "falcon_mamba": ({"state_size": 8, "time_step_rank": 8}, "chain"),
    "flex_olmo": (EXPERTS, "tree"),
    "gemma": ({}, "tree"),
    "gemma3n_text": (
        WINDOW
        | PER_LAYER
        | {
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        "stretches",
    ),
    # The last layer takes keys and values of the first.
    "gemma4_text": (
        PER_LAYER
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 6,
            "num_kv_shared_layers": 1,
            "global_head_dim": 8,
        },
        "stretches",
    ),
    "glm": ({}, "tree"),
    "glm4_moe": (ROUTED, "tree"),
    "glm4_moe_lite": (LATENT | ROUTED, "tree"),
    "gpt2": (OF_GPT, "tree"),
    "gpt_bigcode": (OF_GPT, "tree"),
    "gpt_neox": ({}, "tree"),
    "gptj": (OF_GPT | {"rotary_dim": 8}, "stretches"),
    "granitemoe": (FOUR, "tree"),
    "granitemoehybrid": (
        FOUR | MAMBA2 | {"shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
        "stretches",
    ),
    "granitemoeshared": (FOUR | {"shared_intermediate_size": 16}, "tree"),
    "hunyuan_v1_dense": ({"attention_bias": False}, "tree"),
    "hunyuan_v1_moe": ({"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16}, "tree"),
    "hyperclovax": ({}, "tree"),
    "jamba": (
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
        "stretches",
    ),
    "laguna": (EXPERTS, "stretches"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "stretches"),
    "lfm2_moe": (
        EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "stretches",
    ),
    "longcat_flash": (LATENT, "tree"),
    "mamba": ({"state_size": 8, "time_step_rank": 8}, "chain"),
    "mamba2": (
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        "stretches",
    ),
    "mimo_v2_flash": (EXPERTS | WINDOW, "stretches"),
    "minicpm3": (LATENT, "tree"),
    "minimax": (
        FOUR | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
        "chain",
    ),
    "minimax_m2": (FOUR, "tree"),
    "nemotron": ({}, "stretches"),
    "olmo": ({}, "tree"),
    "olmo2": ({}, "tree"),
    "olmo_hybrid": (LINEAR, "stretches"),
    "olmoe": (EXPERTS, "tree"),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "tree"),
    "persimmon": ({}, "tree"),
    "phi": ({}, "tree"),
    "phimoe": (FOUR | {"router_jitter_noise": 0.01}, "tree"),
    "qwen2_moe": (EXPERTS | SHARED, "tree"),
    "seed_oss": ({"residual_dropout": 0.1, "attention_dropout": 0.1}, "tree"),
    "solar_open": (ROUTED, "tree"),
    "stablelm": ({}, "stretches"),
    "starcoder2": ({"residual_dropout": 0.1, "embedding_dropout": 0.1}, "tree"),
    "zamba2": (
        {
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "num_key_value_heads": 4,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
        "stretches",
    ),
}
ALL: Final = FAMILIES | OTHERS


def write_family(folder: Path, kind: str) -> str:
    """Write a model of the family `kind`, of random weights, with a tokenizer of 97 words."""
    torch.manual_seed(0)
    extra, _ = ALL[kind]
    # A published configuration has one head size; some classes only compute it.
    computed = {"head_dim"} if kind in ("falcon", "zamba2") else set()
    given = extra if "text_config" in extra else TEXT | extra
    given = {name: value for name, value in given.items() if name not in computed}
    config = AutoConfig.for_model(kind, **given)
    loader_of(config).from_config(config).save_pretrained(folder)
    write_words(folder)
    return str(folder)
