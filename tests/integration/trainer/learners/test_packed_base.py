"""On a base of 4 or 8 bits the adapter is trained, and the packed weights stay as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer.families import write_family
from tests.support.training import recipe, rows
from trainer.errors import LearnerError
from trainer.learners.layouts import compare_layout
from trainer.learners.learner import Learner
from trainer.learners.memory import footprint
from trainer.learners.model import Base, load_base
from trainer.recipes.recipe import Recipe


def packed(bits: int, **batch: Any) -> Recipe:
    return recipe(**batch).model_copy(update={"base_bits": bits})


def weights(made: Learner, *, trained: bool) -> dict[str, torch.Tensor]:
    return {
        name: weight.detach().clone()
        for name, weight in made._model.named_parameters()
        if weight.requires_grad is trained
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_update_on_a_packed_base_moves_the_adapter_alone(
    tiny_model: str, tmp_path: Path, bits: int, checkpointing: bool
) -> None:
    chosen = packed(bits, gradient_checkpointing=checkpointing)
    made = Learner(tiny_model, chosen, seed=0, scratch=tmp_path)
    assert made.layout == "tree"
    base, adapter = weights(made, trained=False), weights(made, trained=True)
    found = made.update(rows(0))
    assert 0 < found["grad_norm"] < float("inf")
    assert compare_layout(made._model, rows(0), made.layout).largest < 1e-5
    after = weights(made, trained=True)
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert all(not torch.equal(after[name], adapter[name]) for name in after if "lora_B" in name)
    assert {weight.dtype for weight in base.values()} > {torch.float32}
    assert all(torch.equal(now, base[name]) for name, now in weights(made, trained=False).items())


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_base_computes_nearly_the_same_as_the_whole_base(tiny_model: str, bits: int) -> None:
    ids = torch.tensor([rows()[0].ids])
    with torch.no_grad():
        whole, found = (
            load_base(tiny_model, chosen)[0](input_ids=ids).logits
            for chosen in (recipe(), packed(bits))
        )
    assert 0 < float((found - whole).norm() / whole.norm()) < {4: 0.2, 8: 0.02}[bits]


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_base_has_the_same_hash_as_the_whole_base(tiny_model: str, bits: int) -> None:
    assert Base(tiny_model, packed(bits)).hash == Base(tiny_model, recipe()).hash


@pytest.mark.parametrize("bits", [4, 8])
def test_planned_memory_of_weights_equals_that_of_the_packed_base(
    tiny_model: str, bits: int
) -> None:
    base = load_base(tiny_model, packed(bits))[0]
    kept = [*base.parameters()]
    for weight in base.parameters():
        state = getattr(weight, "quant_state", None)
        kept += [] if state is None else [state.absmax, state.state2.absmax]
    loaded = sum(tensor.nbytes for tensor in kept)
    unpacked = 4 * 64 * 32
    planned = footprint(tiny_model, packed(bits), "cpu").weights
    assert planned - unpacked == pytest.approx(loaded, rel=0.01)


def test_linear_layers_of_mamba_are_packed_and_the_head_is_not(tmp_path: Path) -> None:
    """Its kernels multiply by some of them themselves in training mode alone."""
    base = load_base(write_family(tmp_path, "nemotron_h"), packed(4))[0]
    kinds = {name.rpartition(".")[2]: type(part).__name__ for name, part in base.named_modules()}
    names = ("in_proj", "out_proj", "q_proj", "lm_head")
    assert [kinds[name] for name in names] == ["Linear4bit", "Linear4bit", "Linear4bit", "Linear"]


def test_packing_of_an_unpackable_base_is_refused_with_the_reason(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path, "qwen3_moe")
    for refuses in (load_base, footprint):
        with pytest.raises(LearnerError, match=r"experts .*, which bitsandbytes cannot pack"):
            refuses(model, packed(4))
    monkeypatch.setattr("trainer.learners.model.is_bitsandbytes_available", lambda: False)
    with pytest.raises(LearnerError, match=r"base_bits = 4 needs bitsandbytes: install it"):
        load_base(tiny_model, packed(4))
