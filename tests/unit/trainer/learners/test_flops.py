"""The operations of training are those that torch counts, and a GPU's peak is known by its name."""

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from tests.support.trainer.families import FAMILIES, TEXT
from trainer.batches import bare_row
from trainer.learners.flops import (
    ModelFlops,
    Throughput,
    model_flops,
    peak_flops,
    try_model_flops,
)
from trainer.learners.model import empty_model, loader_of
from trainer.learners.scoring import decoder_of

TOKENS = 16


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "qwen3_moe", "mixtral", "phi3", "mistral3", "deepseek_v3"]
)
def test_estimated_operations_of_training_on_a_frozen_base_equal_torchs_count(kind: str) -> None:
    extra, _ = FAMILIES[kind]
    given = extra if "text_config" in extra else TEXT | extra
    config = AutoConfig.for_model(kind, **given)
    flops = model_flops(empty_model(config))
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
    assert flops.training_flops(TOKENS, TOKENS**2, 1) == counted.get_total_flops()


def test_attention_layers_with_a_window_are_counted_within_their_window() -> None:
    flops = model_flops(empty_model(AutoConfig.for_model("gemma2", **TEXT | FAMILIES["gemma2"][0])))
    assert flops.windows == (6, None)
    alone = 4.0 * (flops.matrices * 100 + flops.head * 10)
    seen = flops.training_flops(100, 5050, 10) - alone
    assert seen == 6.0 * flops.attention * (600 + 5050)


def test_speed_is_of_training_alone_and_idle_share_of_the_time_since_the_last_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flops = ModelFlops(matrices=100, head=10, attention=0, windows=())
    now = iter([0.0, 2.0, 5.0, 12.0, 15.0, 15.0])
    monkeypatch.setattr("trainer.learners.flops.perf_counter", now.__next__)
    monkeypatch.setattr("trainer.learners.flops.peak_flops", lambda _: 1000.0)
    measured = Throughput(flops, torch.device("cpu"), 2)
    rows = [bare_row(0, [1, 2, 3], [4, 5]), bare_row(1, [1, 2, 3], [6])]
    with measured.computing():
        pass
    first = measured.figures(rows, epochs=3, seconds=2.0)
    # Four distinct inputs, three scored, three times.
    operations = 3 * 4 * (100 * 4 + 10 * 3)
    assert first == {"tokens_per_second": 6, "mfu": operations / (2.0 * 2 * 1000.0)}
    with measured.computing():
        pass
    assert measured.figures(rows, epochs=3, seconds=2.0) == first | {"idle_share": 0.7}


def test_model_of_unknown_operations_has_no_mfu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads of Gemma 4 have another size in each kind of layer, and its configuration has none."""
    kinds = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=2, layer_types=kinds)
    with capture_logs() as logs:
        flops = try_model_flops(empty_model(config))
    assert [line["event"] for line in logs] == ["flops_not_counted"]
    monkeypatch.setattr("trainer.learners.flops.peak_flops", lambda _: 1000.0)
    measured = Throughput(flops, torch.device("cpu"), 1)
    assert measured.figures([bare_row(0, [1, 2], [4])], 1, 1.0) == {"tokens_per_second": 2}


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
def test_peak_operations_a_second_are_known_by_the_name_of_the_gpu(
    name: str, peak: float | None
) -> None:
    assert peak_flops(name) == peak
