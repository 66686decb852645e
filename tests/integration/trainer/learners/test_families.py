"""Models of the families that people train: each loads, and its update is that of whole rows."""

from pathlib import Path
from typing import NamedTuple

import pytest

from pawl.commands.plan import rehearse
from tests.integration.trainer.learners.conftest import short_plans
from tests.support.trainer.families import ALL, FAMILIES, write_family
from tests.support.trainer.reference import (
    adapted,
    distance,
    gradients_of_update,
    reference_gradients,
    shake,
)
from tests.support.training import grown, recipe, sft_recipe
from trainer.learners.layouts import compare_layout
from trainer.learners.learner import Learner
from trainer.learners.model import checkpoint_layers

pytestmark = pytest.mark.usefixtures("short_plan")

FEW = recipe(micro_batch_tokens=80)
# One of each kind of layers: the gradient of each family is compared with plain transformers'.
REHEARSED = [
    *("llama", "qwen3_moe", "qwen3_vl", "gemma2", "gemma3", "gpt_oss", "qwen3_next"),
    *("qwen3_5_moe", "llama4", "nemotron_h", "deepseek_v3"),
]
# Their memory has no plan; they are trained all the same.
UNPLANNED = {"dbrx", "gpt2", "gptj", "longcat_flash"}


class Trained(NamedTuple):
    """A learner of a model of the family `kind`, which is in `folder`."""

    kind: str
    folder: str
    learner: Learner


@pytest.fixture(scope="module", params=ALL)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    scratch = tmp_path_factory.mktemp(request.param)
    folder = write_family(scratch / "model", request.param)
    with short_plans():
        made = Learner(folder, sft_recipe(micro_batch_tokens=80), seed=0, scratch=scratch)
    return Trained(request.param, folder, made)


def test_memory_of_each_model_family_is_planned(trained: Trained) -> None:
    """Of all but `UNPLANNED`, also of layers that share keys and values, and of named masks."""
    planned = trained.learner._memory_plan
    if trained.kind in UNPLANNED:
        assert planned is None
        return
    assert planned is not None
    assert planned.plain > planned.checkpointed > 0
    assert planned.context == 4096
    if trained.kind in FAMILIES:
        assert (planned.why_no_tree is None) == (trained.learner.layout == "tree")


def test_layers_that_read_images_have_no_adapter(trained: Trained) -> None:
    names = adapted(trained.learner)
    assert names
    assert not [name for name in names if "vision" in name or "visual" in name]


def test_updates_gradient_equals_plain_transformers(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, folder, made = trained
    assert made.layout == ALL[kind][1]
    # As small as an adapter's are: some random models are badly conditioned.
    shake(made, 0.03)
    found = gradients_of_update(made, grown(turns=6), monkeypatch)
    assert distance(found, reference_gradients(folder, made, grown(turns=6))) < 1e-5


@pytest.mark.parametrize("kind", REHEARSED)
def test_update_of_each_model_family_is_rehearsed(tmp_path: Path, kind: str) -> None:
    """Ten calls that grow, or drop their thoughts, to 16 times the tokens of a micro-batch."""
    done = rehearse(write_family(tmp_path, kind), FEW, context=1280, turns=10)
    assert done.layout == FAMILIES[kind][1]
    assert done.gradient_distance < 1e-4
    assert done.computed_tokens <= 1.2 * done.unique_tokens


@pytest.mark.parametrize("kind", [*REHEARSED, "falcon_h1"])
def test_gradient_of_each_kind_of_layers_equals_whole_rows_in_double_precision(
    tmp_path: Path, kind: str
) -> None:
    """Checkpointed or not. In float32 rounding alone comes to 5e-5 of the largest entry."""
    made = Learner(write_family(tmp_path / "model", kind), FEW, seed=0, scratch=tmp_path)
    model = made._model.double()
    base = model.get_base_model()
    # Grouped products of experts have no double precision.
    base.set_experts_implementation("eager")
    for share in (0.0, 1.0):
        checkpoint_layers(base, share)
        assert compare_layout(model, grown(turns=6), made.layout).largest < 1e-5, share
