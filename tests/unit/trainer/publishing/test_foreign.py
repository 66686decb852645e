"""What an adapter's configuration and shapes must be; a refusal says what, why and what to do."""

import re
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import AdapterError
from trainer.publishing.foreign import (
    read_config,
    why_another_base,
    why_not_plain,
    why_other_layers,
)
from trainer.recipes.recipe import LoraOptions

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/base",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj"],
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
}
LAYERS = {"model.q_proj": (32, 16, 1)}
SHAPES = {"model.q_proj.lora_A.weight": (8, 32), "model.q_proj.lora_B.weight": (16, 8)}


def test_imported_adapter_of_plain_lora_up_to_the_recipes_rank_is_accepted() -> None:
    assert why_not_plain(CONFIG, LoraOptions(rank=8)) is None
    assert why_not_plain(CONFIG | {"task_type": None, "use_rslora": True}, LoraOptions()) is None
    assert why_not_plain(CONFIG | {"init_lora_weights": "gaussian"}, LoraOptions()) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3' .*only LORA for CAUSAL_LM .*: train such"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS'"),
        ({"r": 16}, r"rank \(r\) is 16, and the recipe's lora\.rank is 8: .*--max-lora-rank"),
        ({"r": 0}, r"rank \(r\) is 0"),
        ({"r": "8"}, r"rank \(r\) is '8'"),
        ({"use_dora": True}, "use_dora = True, but only plain LoRA .*: train an adapter without"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"use_what_comes_next": True}, "use_what_comes_next = True"),
    ],
)
def test_adapter_that_is_not_plain_lora_is_refused_with_the_reason(
    changes: dict[str, Any], said: str
) -> None:
    why = why_not_plain(CONFIG | changes, LoraOptions(rank=8))
    assert why is not None
    assert re.search(said, why)


def test_base_model_of_an_imported_adapter_is_recognised_by_name_or_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert why_another_base(CONFIG, "org/base") is None
    named = {"base_model_name_or_path": str(tmp_path / "link")}
    assert why_another_base(named, str(tmp_path)) is None
    why = why_another_base(CONFIG, "org/other")
    assert why is not None
    assert why.startswith("its base model is 'org/base', and the policy's is 'org/other'")
    assert "write the latter as base_model_name_or_path into its adapter_config.json" in why
    assert why_another_base({"base_model_name_or_path": ["org/base"]}, "org/base") is not None
    assert why_another_base({}, "org/base") is not None


def test_imported_adapter_with_the_base_models_layer_shapes_is_accepted() -> None:
    assert why_other_layers(SHAPES, 8, LAYERS) is None
    assert why_other_layers(SHAPES, 8, LAYERS | {"model.k_proj": (1, 1, 1)}) is None
    stacked = {"model.q_proj.lora_A.weight": (32, 32), "model.q_proj.lora_B.weight": (16, 32)}
    assert why_other_layers(stacked, 8, {"model.q_proj": (32, 16, 4)}) is None


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({}, "it has no weights"),
        ({"model.q_proj.lora_A.weight": (8, 32)}, "lora_B.weight is missing and [16, 8] is needed"),
        (SHAPES | {"model.q_proj.lora_A.weight": (4, 32)}, "is [4, 32] and [8, 32] is needed"),
        (SHAPES | {"model.q_proj.lora_B.weight": (17, 8)}, "of this base model and of rank 8?"),
        (SHAPES | {"model.q_proj.lora_magnitude_vector": (16,)}, "no matrix of plain LoRA"),
        (SHAPES | {"model.lm_head.lora_A.weight": (8, 32)}, "lora.target_modules does not train"),
    ],
)
def test_imported_adapter_with_other_layer_shapes_is_refused_by_name(
    shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    why = why_other_layers(shapes, 8, LAYERS)
    assert why is not None
    assert said in why


def test_folder_without_a_readable_peft_adapter_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"no PEFT adapter: it has no adapter_config\.json"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors; .*safe_serialization"):
        read_config(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
        read_config(tmp_path)
