"""Which layers get an adapter: never a router, never the LM head, never an expert."""

from hypothesis import given
from hypothesis import strategies as st

from trainer.learners.adapter import ModelModule, choose

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")


def module(name: str, kind: str = "Module") -> ModelModule:
    return ModelModule(name=name, kind=kind)


def linear(name: str, kind: str = "Linear") -> ModelModule:
    return ModelModule(name=name, kind=kind, linear=True)


def attention(layer: int) -> list[ModelModule]:
    return [linear(f"model.layers.{layer}.self_attn.{name}") for name in ATTENTION]


def gated(name: str) -> list[ModelModule]:
    return [module(name, "MLP"), *(linear(f"{name}.{own}") for own in GATED)]


def model(*parts: ModelModule) -> list[ModelModule]:
    head = ModelModule(name="lm_head", kind="Linear", linear=True, head=True)
    return [module("", "ForCausalLM"), module("model", "Model"), *parts, head]


def in_layer(layer: int, *names: str) -> set[str]:
    return {f"model.layers.{layer}.{name}" for name in names}


def chosen(parts: list[ModelModule]) -> set[str]:
    layers = choose(parts)
    assert layers is not None
    return set(layers)


def test_a_dense_model_has_adapters_on_all_linear_layers() -> None:
    assert choose(model(*attention(0), *gated("model.layers.0.mlp"))) is None


STACKED = model(
    *attention(0),
    module("model.layers.0.mlp", "SparseMoeBlock"),
    module("model.layers.0.mlp.gate", "TopKRouter"),
    module("model.layers.0.mlp.experts", "SomeExperts"),
    *gated("model.layers.0.mlp.shared_expert"),
    linear("model.layers.0.mlp.shared_expert_gate"),
)
SHARED = [f"mlp.shared_expert.{name}" for name in GATED]
OF_ATTENTION = [f"self_attn.{name}" for name in ATTENTION]


def test_stacked_experts_have_no_adapters_and_shared_ones_have() -> None:
    assert chosen(STACKED) == in_layer(0, *OF_ATTENTION, *SHARED)


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


def test_dense_layers_among_mixtures_have_adapters_and_what_servers_fold_has_none() -> None:
    latent = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    parts = model(
        *(linear(f"model.layers.0.self_attn.{name}") for name in latent),
        *gated("model.layers.0.mlp"),
        module("model.layers.1.mlp.gate", "TopkRouter"),
        module("model.layers.1.mlp.experts", "Experts"),
        *gated("model.layers.1.mlp.shared_experts"),
    )
    of_latent = [f"self_attn.{name}" for name in latent if name != "kv_b_proj"]
    first = in_layer(0, *of_latent, *(f"mlp.{name}" for name in GATED))
    assert chosen(parts) == first | in_layer(1, *(f"mlp.shared_experts.{name}" for name in GATED))


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
                linear=draw(st.booleans()),
            )
            for name in names
        )
    )


@given(models())
def test_of_any_model_routers_experts_and_head_are_left(parts: list[ModelModule]) -> None:
    every = {part.name for part in parts if part.linear and not part.head}
    chosen_layers = choose(parts)
    layers = every if chosen_layers is None else set(chosen_layers)
    assert layers <= every - {part.name for part in parts if part.kind == "MoeRouter"}
    holders = [part.name for part in parts if part.kind == "MyExperts"]
    assert not any(name == one or name.startswith(f"{one}.") for name in layers for one in holders)
