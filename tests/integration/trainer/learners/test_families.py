"""Models of the families that people train: each loads, and its update is that of whole rows."""

from pathlib import Path

import pytest

from pawl.commands.plan import rehearse
from tests.support.trainer.families import ALL, FAMILIES, write_family
from tests.support.trainer.reference import (
    distance,
    gradients_of_update,
    reference_gradients,
    shake,
)
from tests.support.training import grown, recipe, sft_recipe
from trainer.learners.layouts import compare_layout
from trainer.learners.learner import Learner
from trainer.learners.memory import footprint
from trainer.learners.model import checkpoint_layers

pytestmark = pytest.mark.usefixtures("short_plan")

FEW = recipe(micro_batch_tokens=80)
# One of each kind of layers: the gradient of each family is compared below.
REHEARSED = [
    *("llama", "qwen3_moe", "qwen3_vl", "gemma2", "gemma3", "gpt_oss", "qwen3_next"),
    *("qwen3_5_moe", "llama4", "nemotron_h", "deepseek_v3"),
]


@pytest.mark.parametrize("kind", FAMILIES)
def test_memory_of_each_model_family_is_planned(tmp_path: Path, kind: str) -> None:
    planned = footprint(write_family(tmp_path, kind), FEW)
    layout = FAMILIES[kind][1]
    assert (planned.why_no_tree is None, planned.context) == (layout == "tree", 4096)


@pytest.mark.parametrize("kind", REHEARSED)
def test_update_of_each_model_family_is_rehearsed(tmp_path: Path, kind: str) -> None:
    """Twenty calls that grow, or drop their thoughts, to 32 times the tokens of a micro-batch."""
    done = rehearse(write_family(tmp_path, kind), FEW, context=2560, turns=20)
    assert done.layout == FAMILIES[kind][1]
    assert done.gradient_distance < 1e-4
    assert done.computed_tokens <= 1.2 * done.unique_tokens


@pytest.mark.parametrize("kind", ALL)
def test_updates_gradient_equals_plain_transformers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_family(tmp_path / "model", kind)
    made = Learner(folder, sft_recipe(micro_batch_tokens=80), seed=0, scratch=tmp_path)
    assert made.layout == ALL[kind][1]
    # As small as an adapter's are: some random models are badly conditioned.
    shake(made, 0.03)
    found = gradients_of_update(made, grown(turns=6), monkeypatch)
    assert distance(found, reference_gradients(folder, made, grown(turns=6))) < 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradient_of_each_model_family_equals_whole_rows_in_double_precision(
    tmp_path: Path, kind: str
) -> None:
    """In float32 rounding alone comes to 5e-5 of the largest entry with some."""
    made = Learner(write_family(tmp_path / "model", kind), FEW, seed=0, scratch=tmp_path)
    made._model.double()
    # Grouped products of experts have no double precision.
    made._model.get_base_model().set_experts_implementation("eager")
    assert compare_layout(made._model, grown(turns=6), made.layout).largest < 1e-5


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_checkpointed_layers_give_the_gradient_of_whole_rows(tmp_path: Path, kind: str) -> None:
    made = Learner(write_family(tmp_path / "model", kind), FEW, seed=0, scratch=tmp_path)
    made._model.double()
    made._model.get_base_model().set_experts_implementation("eager")
    checkpoint_layers(made._model.get_base_model(), 1.0)
    assert compare_layout(made._model, grown(turns=6), "stretches").largest < 1e-5


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "mistral3", "llama4"])
def test_layers_that_read_images_have_no_adapter(tmp_path: Path, kind: str) -> None:
    made = Learner(write_family(tmp_path / "model", kind), FEW, seed=0, scratch=tmp_path)
    adapted = [name for name, _ in made._model.named_modules() if name.endswith("lora_A")]
    assert adapted
    assert not [name for name in adapted if "vision" in name or "visual" in name]
