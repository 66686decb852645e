"""The operations of training are those that torch counts, and a GPU's peak is known by its name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from tests.support.trainer.families import FAMILIES, TEXT
from trainer.learners.flops import model_flops, peak_flops
from trainer.learners.model import loader_of
from trainer.learners.scoring import decoder_of

TOKENS = 16


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "qwen3_moe", "mixtral", "phi3", "mistral3", "deepseek_v3"]
)
def test_operations_on_a_frozen_base_are_those_that_torch_counts(kind: str) -> None:
    extra, _ = FAMILIES[kind]
    given = extra if "text_config" in extra else TEXT | extra
    config = AutoConfig.for_model(kind, **given)
    flops = model_flops(config)
    base = loader_of(config).from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    base.requires_grad_(False)
    hidden = config.get_text_config().hidden_size
    states = torch.randn(1, TOKENS, hidden, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        out = decoder_of(base)(inputs_embeds=states, use_cache=False)[0]
        base.get_output_embeddings()(out[:, -1:]).sum().backward()
    # Eager attention computes the pairs that the mask takes away, too.
    assert flops.trained(TOKENS, TOKENS**2, 1) == counted.get_total_flops()


def test_layers_with_a_window_attend_to_no_more_than_it_holds() -> None:
    flops = model_flops(AutoConfig.for_model("gemma2", **TEXT | FAMILIES["gemma2"][0]))
    assert flops.windows == (6, None)
    alone = 4.0 * (flops.matrices * 100 + flops.head * 10)
    seen = flops.trained(100, 5050, 10) - alone
    assert seen == 6.0 * flops.attention * (600 + 5050)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", None),
    ],
)
def test_peak_is_known_by_the_name_of_the_gpu(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
