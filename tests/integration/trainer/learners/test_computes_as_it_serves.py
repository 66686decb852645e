"""The frozen base trains as it serves: no dropout, no noise, no kernel past an adapter."""

import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.bamba import modeling_bamba

from tests.support.trainer.families import ALL, LONG, write_family
from tests.support.trainer.reference import (
    adapted,
    distance,
    gradients_of_update,
    reference_gradients,
    shake,
)
from tests.support.training import grown, sft_recipe
from trainer.batches import bare_row
from trainer.errors import LearnerError
from trainer.learners.learner import Learner
from trainer.learners.memory import footprint
from trainer.learners.model import load_base
from trainer.learners.scoring import decoder_of
from trainer.learners.self_test import LEAST_EFFECT, MOST_EFFECT, randomise_adapter
from trainer.recipes.recipe import LoraOptions

# With smaller weights a model is hardly sure of anything.
SURE = {"initializer_range": 0.3}
FEW = sft_recipe(micro_batch_tokens=80)


def made_of(folder: str, scratch: Path, **lora: Any) -> Learner:
    chosen = FEW.model_copy(update={"lora": LoraOptions(rank=4, alpha=8, **lora)})
    made = Learner(folder, chosen, seed=0, scratch=scratch)
    shake(made)
    return made


def past_adapters(projected: Any, *_: Any, outproj_weight: Any, **__: Any) -> Any:
    """Multiply by the weights of `out_proj` as mamba_ssm's kernel for training does."""
    return torch.nn.functional.linear(projected[..., : outproj_weight.shape[1]], outproj_weight)


def test_mamba_kernel_that_bypasses_adapters_is_not_used_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_family(tmp_path / "model", "bamba")
    made = made_of(folder, tmp_path)
    assert any(name.endswith("out_proj") for name in adapted(made))
    with monkeypatch.context() as patched:
        patched.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", past_adapters)
        found = gradients_of_update(made, grown(turns=4), patched)
    assert distance(found, reference_gradients(folder, made, grown(turns=4))) < 1e-5


@pytest.mark.usefixtures("short_plan")
def test_layer_bypassed_by_the_model_gets_no_adapter(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "falcon_mamba")
    found = {name.rpartition(".")[2] for name in adapted(made_of(folder, tmp_path))}
    assert found == {"in_proj", "x_proj"}
    with pytest.raises(LearnerError, match=r"mixer\.dt_proj: it gets no gradient"):
        made_of(folder, tmp_path, target_modules=["in_proj", "dt_proj"])


def test_longrope_factors_depend_on_served_context_and_not_on_row_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongRoPE, as vLLM's `Phi3LongRoPEScaledRotaryEmbedding` has it."""
    monkeypatch.setitem(ALL, "phi3", (LONG | SURE, "tree"))
    folder = write_family(tmp_path / "model", "phi3")
    rope = AutoConfig.from_pretrained(folder).rope_parameters
    assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("longrope", 64)
    made = made_of(folder, tmp_path)
    short, long = (bare_row(end, range(2, end), (5, 6, 7)) for end in (12, 90))
    seen = []
    for context, factor in ((64, "short_factor"), (65, "long_factor"), (None, "long_factor")):
        if context is not None:
            made.set_served_context(context)
        else:
            made = made_of(folder, tmp_path)
        own = made.version_logprobs(None, [short])
        assert made.version_logprobs(None, [short, long])[0] == pytest.approx(own[0], abs=1e-5)
        seen.append(own[0])
        encode = decoder_of(made._model.get_base_model()).rotary_emb
        positions = torch.tensor([[0, 3, 80]])
        cos, _ = encode(torch.zeros(1), positions)
        scale = math.sqrt(1 + math.log(4096 / 64) / math.log(64))
        wanted = [scale * math.cos(80 / (rope[factor][at] * 1e4 ** (at / 4))) for at in range(4)]
        assert cos[0, 2, :4].tolist() == pytest.approx(wanted, abs=1e-5)
    assert seen[1] == pytest.approx(seen[2])
    assert seen[0] != pytest.approx(seen[1], abs=1e-3)


def test_model_folder_that_lacks_weights_is_refused_with_their_names(tmp_path: Path) -> None:
    """A classifier's."""
    folder = write_family(tmp_path, "qwen2")
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder)
    with pytest.raises(LearnerError, match=r"lack weights of Qwen2ForCausalLM \(lm_head\.weight\)"):
        Learner(folder, FEW, seed=0, scratch=tmp_path)


def configure(folder: str, **settings: Any) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by gptq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised by awq"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"model_type": "brand_new"}, "model type `brand_new`"),
    ],
)
def test_untrainable_model_is_refused_in_a_line_by_plan_and_trainer(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    folder = write_family(tmp_path, "qwen2")
    configure(folder, **settings)
    for use in (footprint, load_base):
        with pytest.raises(LearnerError, match=why) as told:
            use(folder, FEW)
        assert "\n" not in str(told.value)


def test_truncated_or_misshapen_weights_are_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2")
    configure(folder, intermediate_size=64)
    with pytest.raises(LearnerError, match=r"have other shapes for weights of .*down_proj.weight"):
        load_base(folder, FEW)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(LearnerError, match="cannot be loaded: Error while deserializing"):
        load_base(folder, FEW)


@pytest.mark.parametrize(("method", "kind"), [("fp8", "qwen2"), ("mxfp4", "gpt_oss")])
def test_model_stored_in_few_bits_is_trained_in_the_recipes_precision(
    tmp_path: Path, method: str, kind: str
) -> None:
    folder = write_family(tmp_path, kind)
    plain, whole = footprint(folder, FEW), load_base(folder, FEW)[0]
    configure(folder, quantization_config={"quant_method": method})
    packed = footprint(folder, FEW)
    assert packed.weights == plain.weights
    # A server has embeddings, norms and, of mixtures, attention in 16 bits.
    assert 0.3 * plain.served < packed.served < 0.9 * plain.served
    loaded, _ = load_base(folder, FEW)
    assert {p.dtype for p in loaded.parameters()} == {p.dtype for p in whole.parameters()}


@pytest.mark.parametrize("kind", ["qwen2", "bamba", "gpt_oss", "gemma2"])
def test_self_test_adapter_has_a_bounded_effect_in_each_family(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL, kind, (ALL[kind][0] | SURE, ALL[kind][1]))
    made = Learner(write_family(tmp_path / "model", kind), FEW, seed=0, scratch=tmp_path)
    rows = grown(turns=4)
    before = torch.tensor(list(chain(*made.version_logprobs(None, rows))))
    randomise_adapter(made._model, rows, seed=0)
    after = torch.tensor(list(chain(*made.logprobs(rows))))
    assert LEAST_EFFECT <= float((after - before).abs().mean()) <= MOST_EFFECT
