"""Which layers get an adapter, of any model and of real architectures."""

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from tests.support.mixtures import DENSE, MIXTURES, outline, tiny_model
from trainer.errors import LearnerError
from trainer.learners.adapter import (
    STACKED_PARAMETERS,
    ModelModule,
    attach_adapter,
    choose_layers,
    describe_modules,
    detach_adapters,
    save_adapter,
)
from trainer.recipes.recipe import LoraOptions

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
GATED = {"gate_proj", "up_proj", "down_proj"}


def module(name: str, kind: str = "Module") -> ModelModule:
    return ModelModule(name=name, kind=kind)


def linear(name: str, kind: str = "Linear") -> ModelModule:
    return ModelModule(name=name, kind=kind, width=64)


def attention(layer: int) -> list[ModelModule]:
    return [linear(f"model.layers.{layer}.self_attn.{name}") for name in ATTENTION]


def gated(name: str) -> list[ModelModule]:
    return [module(name, "MLP"), *(linear(f"{name}.{own}") for own in GATED)]


def model(*parts: ModelModule) -> list[ModelModule]:
    head = ModelModule(name="lm_head", kind="Linear", width=64, head=True)
    return [module("", "ForCausalLM"), module("model", "Model"), *parts, head]


def in_layer(layer: int, *names: str) -> set[str]:
    return {f"model.layers.{layer}.{name}" for name in names}


def chosen(parts: list[ModelModule]) -> set[str]:
    return set(choose_layers(parts))


OF_ATTENTION = [f"self_attn.{name}" for name in ATTENTION]


def test_experts_that_are_modules_have_no_adapters() -> None:
    parts = model(
        *attention(0),
        # As models' own code has them, and transformers before version 5.
        module("model.layers.0.block_sparse_moe", "SparseMoeBlock"),
        linear("model.layers.0.block_sparse_moe.gate"),
        module("model.layers.0.block_sparse_moe.experts", "ModuleList"),
        *gated("model.layers.0.block_sparse_moe.experts.0"),
        *gated("model.layers.0.block_sparse_moe.experts.1"),
    )
    assert chosen(parts) == in_layer(0, *OF_ATTENTION)


def test_routers_are_known_by_their_class_wherever_they_are() -> None:
    parts = model(
        *attention(0),
        # Linear itself (Llama 4), beside other names, and with a linear layer inside (DBRX).
        linear("model.layers.0.ffn.router", "Llama4Router"),
        module("model.layers.1.router", "TextRouter"),
        linear("model.layers.1.router.proj"),
        module("model.layers.2.moe.chooser", "TopKGating"),
        linear("model.layers.2.moe.chooser.layer"),
        module("model.layers.0.ffn.experts", "Experts"),
    )
    assert chosen(parts) == in_layer(0, *OF_ATTENTION)


def test_a_gate_of_attention_is_no_router() -> None:
    parts = model(
        linear("model.layers.0.self_attn.output_gate"),
        module("model.layers.0.self_attn.forget", "ForgetGate"),
        linear("model.layers.0.self_attn.forget.proj"),
        module("model.layers.0.mlp.experts", "Experts"),
    )
    assert chosen(parts) == in_layer(0, "self_attn.output_gate", "self_attn.forget.proj")


LEAVES = ("gate", "router", "shared_expert_gate", "experts", "q_proj", "down_proj", "mlp", "0")
KINDS = ("Linear", "MoeRouter", "MyExperts", "SharedExpertsMLP", "Module")
PATHS = st.lists(st.sampled_from(LEAVES), min_size=1, max_size=4).map(".".join)


@st.composite
def models(draw: st.DrawFn) -> list[ModelModule]:
    names = draw(st.lists(PATHS, unique=True, max_size=12))
    return model(
        *(
            ModelModule(
                name=name,
                kind=draw(st.sampled_from(KINDS)),
                width=draw(st.sampled_from((None, 4, 64))),
            )
            for name in names
        )
    )


@given(models())
def test_routers_experts_and_head_of_any_model_have_no_adapters(parts: list[ModelModule]) -> None:
    every = {part.name for part in parts if part.width == 64 and not part.head}
    layers = chosen(parts)
    assert layers <= every - {part.name for part in parts if part.kind == "MoeRouter"}
    holders = [part.name for part in parts if part.kind == "MyExperts"]
    assert not any(name == one or name.startswith(f"{one}.") for name in layers for one in holders)


# Real architectures: what PEFT is told, and what then has an adapter

LATENT = {"kv_a_proj_with_mqa", "o_proj"}
LINEAR_ATTENTION = {"in_proj_qkvz", "in_proj_ba", "out_proj"}
MAMBA = {"in_proj", "x_proj", "dt_proj", "out_proj"}
STACKS = {"experts.gate_up_proj", "experts.down_proj"}
# By architecture: what the layers with an adapter are called.
WANTED: dict[str, Set[str]] = {
    "mixtral": ATTENTION,
    "qwen2_moe": ATTENTION | GATED,
    "qwen3_moe": ATTENTION,
    "qwen3_next": ATTENTION | GATED | LINEAR_ATTENTION,
    # The layers of a number for each of its four heads are gates.
    "qwen3_5_moe_text": ATTENTION | GATED | {"in_proj_qkv", "in_proj_z", "out_proj"},
    "deepseek_v2": LATENT | GATED | {"q_proj"},
    "deepseek_v3": LATENT | GATED | {"q_a_proj", "q_b_proj"},
    "olmoe": ATTENTION,
    "gpt_oss": ATTENTION,
    "granitemoe": ATTENTION,
    "jamba": ATTENTION | GATED | MAMBA,
    "phimoe": ATTENTION,
    "dbrx": {"Wqkv", "out_proj"},
}


def leaves(paths: Any, parts: int = 1) -> set[str]:
    return {".".join(path.split(".")[-parts:]) for path in paths}


def adapted(model: Any) -> set[str]:
    """What has an adapter: the paths of layers and of stacked parameters."""
    found = set()
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            parameter = getattr(layer, "parameter_name", None)
            own = name.replace(".base_layer", "")
            found.add(f"{own}.{parameter}" if parameter else own)
    return found


@pytest.mark.parametrize("kind", DENSE)
def test_dense_models_have_adapters_on_all_linear_layers(kind: str) -> None:
    parts = describe_modules(outline(kind))
    every = [part.name for part in parts if part.width is not None and not part.head]
    assert choose_layers(parts) == every


@pytest.mark.parametrize("kind", DENSE)
def test_adapters_of_dense_models_are_the_bytes_that_peft_makes(kind: str, tmp_path: Path) -> None:
    """As they were before anything was chosen: an update of a dense model has the same files."""
    ours = attach_adapter(tiny_model(kind), LoraOptions(rank=4, alpha=8), None, seed=7)
    base = tiny_model(kind)
    torch.manual_seed(7)
    config = LoraConfig(
        r=4, lora_alpha=8.0, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(base, config, autocast_adapter_dtype=True)
    theirs.peft_config["default"].target_modules = sorted(
        theirs.peft_config["default"].target_modules
    )
    for name, model in (("ours", ours), ("theirs", theirs)):
        save_adapter(model, tmp_path / name)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_have_adapters_neither_on_routers_nor_on_experts(kind: str) -> None:
    assert leaves(choose_layers(describe_modules(outline(kind)))) == WANTED[kind]


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_peft_adapts_only_the_chosen_layers(kind: str, experts: bool, tmp_path: Path) -> None:
    """PEFT reads names of a mixture's layers as those of its experts, unless it is kept from it."""
    base = tiny_model(kind)
    lora = LoraOptions(rank=2, experts=experts)
    wanted = set(choose_layers(describe_modules(base)))
    stacks = [part.name for part in describe_modules(base) if part.stacked]
    assert all(name.endswith(".experts") for name in stacks)
    assert stacks
    wanted |= {f"{name}.{stack}" for name in stacks for stack in STACKED_PARAMETERS if experts}
    model = attach_adapter(base, lora, None, seed=0)
    assert adapted(model) == wanted
    save_adapter(model, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(written["target_modules"])
    detach_adapters(base)
    assert not any(isinstance(module, LoraLayer) for module in base.modules())
    assert adapted(attach_adapter(base, lora, tmp_path, seed=0)) == wanted


# PEFT takes shared experts of these for their experts, whatever they are called.
MISREAD = {"deepseek_v2", "deepseek_v3", "qwen3_next"}


# The configuration of the tiny DBRX is too small to be computed.
@pytest.mark.parametrize("kind", sorted(MIXTURES.keys() - MISREAD - {"dbrx"}))
def test_adapter_loaded_with_peft_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    """The adapter names whole paths: PEFT takes their ends for other layers, too."""
    ours = attach_adapter(tiny_model(kind), LoraOptions(rank=2, alpha=8), None, seed=0)
    torch.manual_seed(1)
    for name, parameter in ours.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_adapter(ours, tmp_path)
    theirs = PeftModel.from_pretrained(tiny_model(kind), str(tmp_path)).eval()
    assert adapted(theirs) == adapted(ours)
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert torch.allclose(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-5)


# PEFT's own, of the rank that it gives experts.
@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
def test_target_modules_of_the_recipe_keep_pefts_meaning() -> None:
    """PEFT's own: names as before transformers 5 are the experts of today."""
    model = attach_adapter(
        tiny_model("mixtral"), LoraOptions(target_modules=["q_proj", "w1", "w2", "w3"]), None, 0
    )
    assert leaves(adapted(model), 2) == STACKS | {"self_attn.q_proj"}
    everything = attach_adapter(
        tiny_model("mixtral"), LoraOptions(target_modules="all-linear"), None, 0
    )
    attention = {f"self_attn.{name}" for name in ATTENTION}
    assert leaves(adapted(everything), 2) == STACKS | attention | {"gate.weight"}


@pytest.mark.parametrize("names", [["q_proj", "kw_proj"], ["nothing"], "no.*thing"])
def test_unmatched_target_module_is_refused_with_the_layers_there_are(names: Any) -> None:
    with pytest.raises(LearnerError, match=r"lora\.target_modules.*q_proj, k_proj.*leave it out"):
        attach_adapter(tiny_model("llama"), LoraOptions(target_modules=names), None, 0)
